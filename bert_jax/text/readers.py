"""Open any file of records: a table, JSON lines, plain lines, or a dataset of TensorFlow."""

from collections.abc import Iterator, Sequence

from bert_jax.errors import UserError
from bert_jax.text import records, tfds_rows
from bert_jax.text.files import existing
from bert_jax.text.records import Record


def read_records(
    source: str, columns: Sequence[str] = (), *, skips_ragged: bool = False, lines: bool = False
) -> Iterator[Record]:
    """Return the records of a file or of a dataset.

    Args:
      source: a .tsv, .csv or .jsonl, or .gz or .xz of it; or tfds:NAME@SPLIT.
      columns: names for the fields of a table whose first row has none of these names.
      skips_ragged: whether a row of a table with another number of fields is a record without
        fields, rather than an error.
      lines: whether any other file is plain text, whose records are {"text": LINE}.

    Raises:
      UserError: the source does not exist, or is of an unknown kind. A malformed record raises it
        when it is read.

    >>> path = getfixture("tmp_path") / "a.tsv"
    >>> _ = path.write_text("text\\tlabel\\na river\\twater\\n")
    >>> [record.fields for record in read_records(str(path))]
    [{'text': 'a river', 'label': 'water'}]
    """
    if source.startswith(tfds_rows.PREFIX):
        if not source.partition("@")[2]:
            raise UserError(f"{source} names no split; add one, such as {source.rstrip('@')}@train")
        return tfds_rows.read_rows(source, tfds_rows.open_rows(source))
    path = existing(source, remedy="give a file, or tfds:NAME@SPLIT")
    if reader := records.reader(path):
        is_table = reader is records.table_rows
        return reader(path, columns, skips_ragged=skips_ragged) if is_table else reader(path)
    if lines:
        return records.text_lines(path)
    raise UserError(f"{source} is of an unknown kind; give a .tsv, .csv or .jsonl, or .gz or .xz")
