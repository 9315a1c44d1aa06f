"""What leaves the checkout is whole: the container image by its Dockerfile's own lines, the sdist, and its wheel.

No container engine is needed: COPY and RUN lines are carried out below a scratch folder that stands for ``/``, with the
packages of the tests in place of the index's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pytest

from tests.drills import DRILLS

pytest.importorskip("hatchling", reason="the build backend is not installed: pip install hatchling")

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples" / "deployment" / "Dockerfile"
PACKAGES = {
    "shardkit": "shardkit",
    "tools/shardkit_tools": "shardkit_tools",
    "trainer/shardkit_trainer": "shardkit_trainer",
}
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", ".compiling-*")


def shipped() -> set[str]:
    """Files of the packages in the checkout, as they are installed."""
    found = set()
    for source, package in PACKAGES.items():
        for path in (ROOT / source).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
                found.add(f"{package}/{path.relative_to(ROOT / source).as_posix()}")
    return found


def installed(folder: Path) -> set[str]:
    """Files of the packages in a folder, without what was compiled there."""
    return {
        path.relative_to(folder).as_posix()
        for package in PACKAGES.values()
        for path in (folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


def environment() -> dict[str, str]:
    """Nothing comes over the network, and no isolated build needs it."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return {**kept, "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "SHARDKIT_COMPILE": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1"}  # fmt: skip


def packages_of_the_tests() -> list[str]:
    """Folders with installed packages; a .pth line each, whose own .pth files (the editable checkout) do not count."""
    own = {sysconfig.get_path("purelib"), *site.getsitepackages()}
    return sorted(one for one in {*own, *sys.path} if Path(one).name == "site-packages")


# ---- the image


@dataclass
class Image:
    """A file system below a folder, made by the lines of a Dockerfile's stages."""

    root: Path
    context: Path
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    entry: list[str] = field(default_factory=list)

    def real(self, path: str) -> Path:
        """Where a path of the image lies."""
        return self.root / str(PurePosixPath(self.folder) / path).lstrip("/")

    def carry_out(self, instruction: str, rest: str) -> None:
        """One line."""
        if instruction == "COPY":
            self.copy(shlex.split(rest))
        elif instruction == "RUN":
            self.run(rest)
        elif instruction == "WORKDIR":
            self.folder = rest
            self.real(rest).mkdir(parents=True, exist_ok=True)
        elif instruction in {"ARG", "ENV"}:
            for name, value in (word.split("=", 1) for word in shlex.split(rest)):
                self.variables[name] = re.sub(r"\$(\w+)", lambda one: self.variables.get(one[1], ""), value)
        elif instruction == "ENTRYPOINT":
            self.entry = json.loads(rest)
        else:
            assert instruction in {"FROM", "USER", "CMD"}, f"{instruction}: the test does not know it"

    def copy(self, words: list[str]) -> None:
        """From the checkout, or from the stage before, which is the same file system here."""
        *sources, target = [word for word in words if not word.startswith("--from=")]
        if len(sources) < len(words) - 1:
            assert all(self.real(source).exists() for source in sources)
            return
        for source in sources:
            path, into = self.context / source, self.real(target)
            if path.is_dir():
                shutil.copytree(path, into, ignore=LEFT_OUT, dirs_exist_ok=True)
            else:
                into = into / path.name if target.endswith("/") else into
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, into)

    def run(self, line: str) -> None:
        """A shell's line, in which absolute paths are the image's."""
        script = re.sub(r"(?<=[\s\"'=])/(?=(opt|source|cache|runs)\b)", f"{self.root}/", f" {line}")
        self.real(".").mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(
            [str(self.root / "stand-ins"), str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        done = subprocess.run(
            ["sh", "-ec", script], cwd=self.real("."), env={**environment(), **self.variables, "PATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"RUN {line}\n{done.stdout}{done.stderr}"
        assert "does not provide the extra" not in done.stderr
        for folder in self.root.glob("opt/*/lib/python*/site-packages"):
            (folder / "of_the_tests.pth").write_text("".join(f"{one}\n" for one in packages_of_the_tests()))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Lines of a Dockerfile: (instruction, the rest), comments left out and continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined if line.strip()]


@pytest.mark.slow
def test_the_image_is_what_its_dockerfile_says(tmp_path: Path) -> None:
    image = Image(tmp_path / "image", ROOT)
    (image.root / "stand-ins").mkdir(parents=True)
    for name in ("useradd", "install"):  # they change the machine, or need rights
        (image.root / "stand-ins" / name).write_text("#!/bin/sh\n")
        (image.root / "stand-ins" / name).chmod(0o755)
    lines = instructions(DOCKERFILE)
    assert {"FROM", "COPY", "RUN", "ENTRYPOINT"} <= {instruction for instruction, _ in lines}
    for instruction, rest in lines:
        image.carry_out(instruction, rest)

    (packages,) = image.root.glob("opt/shardkit/lib/python*/site-packages")
    assert installed(packages) == shipped()
    search = image.variables["PATH"].replace("/opt/", f"{image.root}/opt/")
    program = shutil.which(image.entry[0], path=search)
    assert program is not None
    assert Path(program).is_relative_to(image.root)
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.txt").write_text("text")
    for line in ("--help", f"build {source} {tmp_path}/data", f"verify {tmp_path}/data"):
        done = subprocess.run([program, *line.split()], cwd=tmp_path, env=environment(), capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr


# ---- sdist and wheel


def build(target: str, source: Path, out: Path, **settings: str) -> Path:
    """Of one source tree, by the backend that pyproject.toml names; without network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(command, cwd=source, env=environment() | settings, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder / "made")) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.mark.slow
def test_a_wheel_of_the_sdist_has_every_file(tree: Path, tmp_path: Path) -> None:
    for name in TO_WORK_IN_IT:
        assert (tree / name).exists(), f"{name} is missing in the sdist"
    wheel = build("wheel", tree, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    assert installed(tmp_path / "installed") == shipped()
    (scripts,) = (tmp_path / "installed").glob("*.dist-info/entry_points.txt")
    assert "shardkit = shardkit_tools.main:run" in scripts.read_text().splitlines()
    check = (
        "import shardkit, shardkit_tools.main, shardkit_trainer as t; print(shardkit.__file__, t.__file__)"
    )
    paths = os.pathsep.join([str(tmp_path / "installed"), *packages_of_the_tests()])
    done = subprocess.run([sys.executable, "-S", "-c", check], cwd=tmp_path, env={**environment(), "PYTHONPATH": paths},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(tmp_path / "installed")) == 2


COMPILES = importlib.util.find_spec("shardkit.loader.block_rows") is not None
NO_COMPILER = {"CC": "there-is-no-such-compiler"}


def clean_environment(folder: Path) -> Path:
    """The interpreter of a new virtual environment: no shardkit in it, its dependencies those of the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "of_the_tests.pth").write_text("".join(f"{one}\n" for one in packages_of_the_tests()))
    return folder / "bin" / "python"


def pip_install(python: Path, what: Path, **settings: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--ignore-installed",
        str(what),
    ]
    done = subprocess.run(command, cwd=python.parent, env=environment() | settings, capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def try_installed(python: Path, *arguments: str) -> str:
    command = [str(python), str(ROOT / "tests" / "installed_wheel.py"), *arguments]
    done = subprocess.run(
        command, cwd=python.parent, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(python.parent.parent) in done.stdout, "not the checkout's"
    return done.stdout


@pytest.mark.slow
def test_without_a_compiler_pip_installs_the_source_and_it_is_used(tree: Path, tmp_path: Path) -> None:
    python = clean_environment(tmp_path / "clean")
    pip_install(python, tree, **NO_COMPILER, SHARDKIT_COMPILE="")
    assert "compiled modules: False" in try_installed(python, "--without-compiled")
    with pytest.raises(AssertionError, match="there-is-no-such-compiler"):  # as for a release
        build("wheel", tree, tmp_path / "refused", **NO_COMPILER, SHARDKIT_COMPILE="required")


PHOTOS = """
import datasets, numpy as np, PIL.Image
rng = np.random.default_rng(1)
photos = [PIL.Image.fromarray(rng.integers(0, 256, (90 + n % 7, 120, 3), dtype="uint8")) for n in range(96)]
rows = {"image": photos, "label": [n % 3 for n in range(96)]}
features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["ant", "bee", "cow"]))
datasets.Dataset.from_dict(rows, features=features).to_parquet("photos.parquet")
"""

THREE_BATCHES = """
from itertools import islice
import shardkit
from shardkit import images
ds = shardkit.open("photos")
plan = ds.plan(global_batch=16, seed=0)
for batch in islice(ds.loader(plan, decode={"image": images.random_resized_crop(64)}), 3):
    print(batch["image"].shape, batch["image"].dtype, [ds.classes[n] for n in batch["label"][:2]])
"""


@pytest.mark.slow
@pytest.mark.drill
def test_the_path_of_a_person_with_pictures(tree: Path, tmp_path: Path) -> None:
    """From nothing to three decoded batches of one's own Parquet, in four commands; in `make drills` with the index.

    What was compiled is in the wheel, and in use.
    """
    wheel = build("wheel", tree, tmp_path / "wheel", SHARDKIT_COMPILE="required" if COMPILES else "")
    assert wheel.name.endswith("-py3-none-any.whl") is not COMPILES
    subprocess.run([sys.executable, "-c", PHOTOS], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "batches.py").write_text(THREE_BATCHES)
    commands = [
        [sys.executable, "-m", "venv", "clean"],
        ["clean/bin/pip", "install", f"{wheel}[images]"],
        ["clean/bin/shardkit", "build", "photos.parquet", "photos", "--stratify", "__class__"],
        ["clean/bin/python", "batches.py"],
    ]
    clean = {name: value for name, value in environment().items() if not name.startswith("PIP_NO_")}
    took = []
    for command in commands:
        began = time.monotonic()
        if not DRILLS and command[-1] == "clean":
            clean_environment(tmp_path / "clean")
        elif not DRILLS and "install" in command:
            pip_install(tmp_path / "clean" / "bin" / "python", wheel)
        else:
            done = subprocess.run(
                command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        took.append(f"{' '.join(command[:2])}: {time.monotonic() - began:.1f} s")
    print("; ".join(took))
    try_installed(tmp_path / "clean" / "bin" / "python", *[] if COMPILES else ["--without-compiled"])
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("(16, 3, 64, 64) uint8 ['") for line in lines), lines
    assert {name for line in lines for name in re.findall("'(.*?)'", line)} <= {"ant", "bee", "cow"}


def test_the_workflow_builds_every_wheel_of_a_release() -> None:
    yaml = pytest.importorskip("yaml")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheels = project["tool"]["cibuildwheel"]
    minors = [11, 12, 13, 14]
    assert wheels["build"] == [f"cp3{minor}-manylinux_*" for minor in minors]
    named = {one.rpartition(" ")[2] for one in project["project"]["classifiers"] if "Python :: 3." in one}
    assert named == {f"3.{minor}" for minor in minors}
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]
    assert jobs["wheels"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert jobs["publish"]["environment"] == "release", "a person approves it"
    assert set(jobs["publish"]["needs"]) == {"wheels", "sdist"}
    script = shlex.split(wheels["test-command"].replace("{project}", str(ROOT)))[1]
    assert Path(script).exists()


TO_WORK_IN_IT = (
    "hatch_build.py", "pyproject.toml", "constraints.txt", "Makefile", "tools/install.sh", "tests/conftest.py",
    "zensical.toml", "README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE",
)  # fmt: skip
"""What `make setup` and `make test` need besides the packages."""
