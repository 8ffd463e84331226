"""Entry point of `python -m twin`."""

from twin.cli import main

main()
