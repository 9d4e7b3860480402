"""`tailrace version`."""

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from tailrace import __version__
from tailrace.cli import options

EPILOG = "\b\nExamples:\n  tailrace version\n  tailrace version --json"

_SHOWN = ("openvino", "openvino-genai", "nncf", "tokenizers", "numpy")


def version(
    as_json: bool = options.JSON,
) -> None:
    """Print the versions of tailrace and its libraries."""
    from tailrace.cli.output import print_json

    found = {"tailrace": __version__, "python": platform.python_version()}
    for package in _SHOWN:
        try:
            found[package] = installed_version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if as_json:
        print_json(found)
        return
    for name, text in found.items():
        print(f"{name} {text}")
