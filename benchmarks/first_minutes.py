"""Record what a new user sees: lines with their times, the first of them, the longest silence.

    python benchmarks/first_minutes.py OUTPUT.md 'pip install -e .' 'python train.py' ...

The commands run one after the other in the current folder, in the current environment: as on a
terminal (`--terminal`, a pseudo-terminal of 100 columns, of which a rewritten line is shown once,
as it was last) or as into a file.
"""

import argparse
import os
import platform
import pty
import re
import select
import shlex
import subprocess
import sys
import termios
import time
from pathlib import Path

_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def record(command: str, *, is_terminal: bool) -> tuple[str, str]:
    """Run a command; return a row of the table, and what it printed with times."""
    if is_terminal:
        reader, writer = pty.openpty()
        termios.tcsetwinsize(writer, (40, 100))
    else:
        reader, writer = os.pipe()
    started = last = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=writer, stderr=writer
    )
    os.close(writer)
    first, silence, silent_after = None, 0.0, "the start"
    lines, rest = [], b""
    while True:
        ready, _, _ = select.select([reader], [], [], 0.2)
        try:
            data = os.read(reader, 1 << 16) if ready else None
        except OSError:  # a pseudo-terminal whose other end has closed
            data = b""
        now = time.monotonic()
        if data:
            if first is None:
                first = now - started
            if now - last > silence:
                silence = now - last
                text = _ESCAPE.sub(b"", rest or (lines[-1][1] if lines else b"")).decode()
                silent_after = text.split("\r")[-1].strip()[:60] or "the start"
            last = now
            *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n")
            lines += [(now - started, line.split(b"\r")[-1]) for line in whole]
            rest = rest[-4096:]
        elif data == b"" or (data is None and process.poll() is not None and not ready):
            break
    code, total = process.wait(), time.monotonic() - started
    silence = max(silence, time.monotonic() - last)
    shown = [
        f"[{seconds:6.1f}] {_ESCAPE.sub(b'', line).decode(errors='replace').rstrip()}"
        for seconds, line in lines
    ]
    cell = command.replace("|", "\\|")
    times = f"{first or total:.1f} | {silence:.1f} | {silent_after} | {total:.1f}"
    row = f"| `{cell}` | {code} | {times} |"
    return row, f"$ {command}\n" + "\n".join(shown)


def main() -> None:
    """Record the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("commands", nargs="+")
    parser.add_argument("--terminal", action="store_true")
    args = parser.parse_args()
    rows, texts = [], []
    for command in args.commands:
        row, text = record(command, is_terminal=args.terminal)
        print(row, flush=True)
        rows.append(row)
        texts.append(text)
    head = "| command | exit code | first line, s | longest silence, s | after | in all, s |"
    where = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    kind = "as on a terminal" if args.terminal else "as into a file"
    table = "\n".join([head, "|---|---:|---:|---:|---|---:|", *rows])
    body = "\n\n".join(f"```text\n{text}\n```" for text in texts)
    call = shlex.join(["python", "benchmarks/first_minutes.py", *sys.argv[1:]])
    args.output.write_text(f"{where}, {kind}.\n\n    {call}\n\n{table}\n\n{body}\n")


if __name__ == "__main__":
    main()
