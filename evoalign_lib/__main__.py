"""`python -m evoalign_lib` is the command `evoalign`."""

from evoalign_lib.cli import app

if __name__ == "__main__":
    app(prog_name="evoalign")
