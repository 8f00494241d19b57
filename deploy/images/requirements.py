"""`requirements.py EXTRA...`: what pyproject.toml asks for, with these extras; for layers that hold no code of ours."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [requirement for extra in sys.argv[1:] for requirement in project["optional-dependencies"][extra]]
print(*project["dependencies"], *extras, sep="\n")
