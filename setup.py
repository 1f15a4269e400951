"""What pyproject.toml cannot say: the description of the package for an index.

README's links lead to files beside it, and its pictures are such files; an index has neither.
"""

import re
from pathlib import Path

from setuptools import setup


def standalone(readme: str) -> str:
    """Return a page in Markdown without its pictures, with links to files as the files' names."""
    readme = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n\n?", "", readme, flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\((?!https?:)([^)#]*)[^)]*\)", named, readme)


def named(link: re.Match[str]) -> str:
    text, file = link.groups()
    return text if not file or text in file else f"{text} ({file})"


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=standalone(readme), long_description_content_type="text/markdown")
