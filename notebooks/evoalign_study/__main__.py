"""`python -m evoalign_study` is the paper's command line."""

from evoalign_study.cli import app

if __name__ == "__main__":
    app(prog_name="python -m evoalign_study")
