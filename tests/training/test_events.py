"""Event files: to the byte what TensorFlow's and tensorboardX's writers make of the same values."""

from bert_jax.training import events

# tensorboardX 2.6.5: SummaryWriter(folder, purge_step=300).add_scalar("train/loss", 2.5, 300),
# at this time.
TIME = 1763728000.25
VERSION = b'\x18\0\0\0\0\0\0\0\xa3\x7fK"\t\0\0\x10\xa0\x16H\xdaA\x1a\rbrain.Event:2\x98\x8a\xed\xe1'
BEGUN = (
    b"\x10\0\0\0\0\0\0\0\x95\xfb\xfe\x18\t\0\0\x10\xa0\x16H\xdaA\x10\xac\x02:\x02\x08\x01S\xc8?\x83"
)
SCALAR = (
    b"!\0\0\0\0\0\0\0\x01{\xec\xf6\t\0\0\x10\xa0\x16H\xdaA\x10\xac\x02*\x13\n\x11\n\ntrain/loss"
    b"\x15\0\0 @\xd2\xe9w\xec"
)


def test_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(events.time, "time", lambda: TIME)
    file = events.EventFile(tmp_path / "new", first_step=300)
    file.scalar("train/loss", 2.5, 300)
    (path,) = (tmp_path / "new").glob("events.out.tfevents.*")
    assert path.read_bytes() == VERSION + BEGUN + SCALAR  # nothing waits to be written
    file.close()
