"""Print the tables of the tutorial and the how-to guides anew, when a change of the simulation has changed them.

    python tests/docs/refresh_tables.py FOLDER

FOLDER is where commands run (made if need be). It must hold AzureLLMInferenceTrace_conv.csv; a table whose command
fails is left as it is. Read the prose around the tables again afterwards: it quotes them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRINTED = re.compile(r"(```console\n(?:[^`]*\n)?\$ ([^`\n]*)\n```\n\n```text\n)([^`]*)(\n```)")
FILE = re.compile(r"Save this as `([\w.-]+)`:\n\n```\w+\n(.*?)```", re.S)


def refresh(page: Path, folder: Path) -> None:
    """Write the page with its tables as they are printed now."""
    text = page.read_text()
    for name, content in FILE.findall(text):
        (folder / name).write_text(content)
    for command in re.findall(r"^\$ (twin calibrate .*)$", text, re.M):
        subprocess.run(command, shell=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    page.write_text(PRINTED.sub(lambda match: match[1] + _table(match[2], match[3], folder) + match[4], text))


def _table(command: str, old: str, folder: Path) -> str:
    """The output of the command, without the footnote."""
    print(command, flush=True)
    ran = subprocess.run(f"{command} --no-figures", shell=True, cwd=folder, stdout=subprocess.PIPE, text=True)
    lines = [line.rstrip() for line in ran.stdout.splitlines() if "r* =" in line or re.match(r" *(r|[\d.]+) ", line)]
    return "\n".join(lines) if ran.returncode == 0 else old


if __name__ == "__main__":
    place = Path(sys.argv[1])
    shutil.copytree(ROOT / "examples", place / "examples", dirs_exist_ok=True)
    for guide in sorted([*(ROOT / "docs/tutorial").glob("*.md"), *(ROOT / "docs/how-to").glob("*.md")]):
        refresh(guide, place)
