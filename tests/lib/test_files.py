"""Locks, files written in one piece, and the JSON text of which hashes are taken; all across real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evoalign_lib.files import canonical_json, locked

HOLDER = """import sys, time
from evoalign_lib.files import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""

ADDER = """import sys
from pathlib import Path
from evoalign_lib.files import locked, replace_text
counter = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
for _ in range(200):
    with locked(counter):
        replace_text(counter, str(int(counter.read_text()) + 1))
"""


def start(program: str, path: Path) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2], **pipes)


def test_a_lock_has_one_holder_and_a_killed_one_gives_it_back(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    with start(HOLDER, path) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match=r"records\.jsonl is locked by another process: wait"):
            with locked(path, wait=False):
                pass
        with locked(path.with_name("other.jsonl"), wait=False):  # another file has another lock
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    with locked(path, wait=False):
        assert not path.exists()
    assert {file.name for file in path.parent.iterdir()} <= {".records.jsonl.lock", ".other.jsonl.lock"}


def test_a_lock_is_given_back_where_the_block_fails(tmp_path):
    with pytest.raises(KeyError):
        with locked(tmp_path / "file"):
            raise KeyError
    with locked(tmp_path / "file", wait=False):
        pass


def test_two_processes_that_read_and_write_under_a_lock_lose_nothing(tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    with start(ADDER, counter) as one, start(ADDER, counter) as other:
        assert one.stdout.readline() == other.stdout.readline() == b"ready\n"
        one.stdin.close(), other.stdin.close()  # begin
    assert one.returncode == other.returncode == 0
    assert counter.read_text() == "400"


WRITER = """import sys
from evoalign_lib.files import replace_bytes
while True:
    for byte in b"ab":
        replace_bytes(sys.argv[1], bytes([byte]) * 2_000_000)
        print(flush=True)
"""


def test_a_file_is_whole_for_readers_and_after_a_kill(tmp_path):
    path = tmp_path / "file"
    with start(WRITER, path) as writer:
        for _ in range(20):
            writer.stdout.readline()
            data = path.read_bytes()
            assert len(data) == 2_000_000 and len(set(data)) == 1
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    data = path.read_bytes()
    assert len(data) == 2_000_000 and len(set(data)) == 1
    assert {file.name for file in tmp_path.iterdir()} <= {"file", f".file.{writer.pid}.part"}


def test_canonical_json_is_one_text_for_equal_values():
    assert canonical_json({"b": 1e-05, "a": ["é", None, True]}) == '{"a":["\\u00e9",null,true],"b":1e-05}'
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            canonical_json({"a": number})
