"""What documents and examples tell people to type exists: every command line, option, setting, file and function."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import shardkit
from shardkit.exit_codes import ExitCode
from shardkit_tools.main import COMMANDS, make_app
from shardkit_trainer import load_configuration
from tests.command_line import call

# ---- What documents and examples tell people to type exists: every command line, option, setting and file in them


ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "examples" / "deployment"
KNOWN = {name for _, names in COMMANDS for name in names}
DOCUMENTS = sorted(
    [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md") if (ROOT / name).exists()]
    + [
        path
        for kind in ("md", "sh", "sbatch", "py", "toml")
        for path in (ROOT / "examples").rglob(f"*.{kind}")
    ]
    + [path for folder in ("docs", "tools/bench/results") for path in (ROOT / folder).glob("*.md")]
)
YAML = sorted((DEPLOYMENT / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted([*(DEPLOYMENT / "ssh").glob("*.sh"), *(DEPLOYMENT / "slurm").glob("*.sbatch")])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def command_lines(text: str) -> Iterator[list[str]]:
    """Words after `shardkit` of every command line in a text: after a prompt, in a script, indented in prose."""
    for line in re.sub(r"\\+\n\s*", " ", text).splitlines():
        for found in re.finditer(r"(?:^|\$ |&& |\| |^# +|^ +|srun [^|&;]*)shardkit ([a-z]+\b[^\n]*)", line):
            words = found[1]
            if words.split()[0] in KNOWN:
                yield words_of(words)


def words_of(line: str) -> list[str]:
    """Words up to the end of the command, placeholders as something that fits anywhere."""
    line = re.split(r"\s#\s|\s+(?:&&|\|\||\||;|>|2>|&)(?:\s|$)|`|\s{3,}", line, maxsplit=1)[0]
    words = shlex.split(line.replace("…", ""), comments=False)
    return [re.sub(r"\$\{?\w+\}?|\bN\b", "1", word) for word in words]


def check_command(words: list[str]) -> None:
    """Parse as the program would, without running it."""
    group: Any = typer.main.get_command(make_app(words[0]))
    command, rest = group.commands[words[0]], words[1:]
    if rest and rest[0] in getattr(command, "commands", ()):
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(words[0], rest)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_command_lines_parse(path: Path) -> None:
    for words in command_lines(path.read_text(encoding="utf-8")):
        try:
            check_command(words)
        except Exception as error:
            pytest.fail(f"shardkit {shlex.join(words)}: {error}")


def test_a_wrong_command_line_would_be_found() -> None:
    lines = list(
        command_lines("$ shardkit build a b --no-such-option   # why\nx && shardkit show a@b | less\n")
    )
    assert lines == [["build", "a", "b", "--no-such-option"], ["show", "a@b"]]
    with pytest.raises(Exception, match="--no-such-option"):
        check_command(lines[0])
    check_command(lines[1])
    assert sum(len(list(command_lines(path.read_text()))) for path in DOCUMENTS) > 20


def test_the_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [(bytes([number % 251]) * 9, number % 3) for number in range(1100)]
    seen: list[int] = []
    names: dict[str, Any] = {
        "my_images": lambda: images,
        "train_step": lambda jpegs, labels: seen.append(len(jpegs) if len(jpegs) == len(labels) else -1),
    }
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert seen == [512, 512]
    assert len(json.dumps(names["state"])) < 200
    resumed = next(iter(names["loader"]))
    assert resumed.step == 1
    planned = names["plan"].step(1)[list(names["loader"].lanes)].ravel()
    assert resumed.samples.tolist() == planned[planned >= 0].tolist()


def test_the_snippets_for_agents_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, as somebody pastes it, on a dataset of digits."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    with shardkit.create("data/digits", schema={"image": "uint8[8,8]", "label": "int64"}) as writer:
        for number in range(200):
            writer.add({"image": [[number % 256] * 8] * 8, "label": number % 10})
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        names: dict[str, Any] = {}
        exec(compile(block, "AGENTS.md", "exec"), names)
        if "state" in names:  # of the end of one or two epochs of three steps
            assert names["state"]["step"] in (3, 6)
            assert len(names["images"]) == len(names["labels"]) == 64
    assert len(shardkit.open("data/squares")) == 100
    for linked in re.findall(r"\]\((.*?)\)", text + (ROOT / "llms.txt").read_text(encoding="utf-8")):
        assert (ROOT / linked).exists(), linked


def test_workflows_name_files_that_exist() -> None:
    """A workflow runs elsewhere: a test file that was removed would stop it only there."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    named = {name for text in texts for name in re.findall(r"\b(?:tests|tools)/[\w/]+\.(?:py|sh)\b", text)}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_free_threaded_workflow_installs_what_shardkit_needs() -> None:
    """It installs packages one by one, because zstandard has no wheel for it."""
    text = (ROOT / ".github" / "workflows" / "free-threaded.yml").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[>=]", one)[0] for one in project["dependencies"]}
    assert needed - {"zstandard"} <= set(" ".join(re.findall("pip install (.*)", text)).split())


RUN = """
[run]
directory = "runs/mine"
steps = 2
[data]
dataset = "data/photos@train"
global_batch = 24
lanes = 4
[model]
kind = "classifier"
image_size = 8
width = 4
stages = 1
"""


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, in their order, on a folder of pictures and a small run."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    for number in range(600):
        path = Path("photos") / f"class{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("L", (8, 8), number % 256).save(path)
    Path("run.toml").write_text(RUN)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", readme, re.DOTALL)
    lines = [
        shlex.split(line[11:], comments=True) for line in re.findall(r"(?m)^\$ shardkit.*$", "".join(blocks))
    ]
    assert [words[0] for words in lines] == ["build", "show", "plan", "verify", "train", "audit", "top"]
    said = {words[0]: call(*words) for words in lines}
    assert {name: code for name, (code, _) in said.items() if code} == {}, said
    assert "clean" in said["audit"][1]
    assert "step 2" in said["top"][1]


def test_every_exit_code_is_explained() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [int(code) for code in re.findall(r"(?m)^\| (\d+) \|", page)] == sorted(ExitCode)


def objects(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def pods(thing: Any) -> Iterator[dict[str, Any]]:
    """Pod specifications anywhere in an object."""
    if isinstance(thing, dict):
        if "containers" in thing:
            yield thing
        for value in thing.values():
            yield from pods(value)


@pytest.mark.parametrize("path", YAML, ids=name_of)
def test_kubernetes_objects_hang_together(path: Path) -> None:
    for document in objects(path):
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)
        template = document["spec"].get("template", {})
        if "matchLabels" in document["spec"].get("selector", {}):
            assert document["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
        for pod in pods(document):
            volumes = {volume["name"] for volume in pod.get("volumes", ())}
            for container in [*pod["containers"], *pod.get("initContainers", ())]:
                assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
                ports = {port["name"] for port in container.get("ports", ())}
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    for how in ("httpGet", "tcpSocket"):
                        assert container.get(probe, {}).get(how, {}).get("port") in {None, *ports}
                check_container(container["command"])


def check_container(command: list[str]) -> None:
    if command[0] == "shardkit":
        check_command(command[1:])
    elif "shardkit_trainer" in command:
        trainer = command[command.index("shardkit_trainer") + 1 :]
        load_configuration(str(DEPLOYMENT / "run.toml"), trainer[1:])
        check_torchrun(
            command[command.index("shardkit_trainer.agent") + 1 : command.index("shardkit_trainer") - 1]
        )


def check_torchrun(options: list[str]) -> None:
    pytest.importorskip("torch")
    from torch.distributed.run import get_args_parser

    get_args_parser().parse_args([*options, "script.py"])


@pytest.mark.parametrize("path", YAML, ids=name_of)
def test_kubernetes_objects_fit_the_schema(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    api = json.loads((ROOT / "tests" / "golden" / "kubernetes" / "api-1.31.json").read_text())
    for document in objects(path):
        schema = {"$ref": f"#/$defs/{api['kinds'][document['kind']]}", "$defs": api["$defs"]}
        jsonschema.Draft202012Validator(schema).validate(document)
        wrong = {**document, "spec": {**document["spec"], "replicaz": 1}}
        assert not jsonschema.Draft202012Validator(schema).is_valid(wrong), "the schema knows all keys"


def test_the_job_fits_the_run() -> None:
    run = tomllib.loads((DEPLOYMENT / "run.toml").read_text())
    service, job = objects(DEPLOYMENT / "kubernetes" / "training.yaml")
    pod = job["spec"]["template"]["spec"]
    assert run["parallel"]["shutdown_s"] < pod["terminationGracePeriodSeconds"]
    listening = int(run["log"]["listen"].rpartition(":")[2])
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert ports["metrics"] == listening
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    command = pod["containers"][0]["command"]
    assert f"--nnodes=1:{job['spec']['completions']}" in command
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    name = job["metadata"]["name"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert f"--rendezvous={name}-0.{pod['subdomain']}:{ports['rendezvous']}" in command
    assert run["run"]["directory"].startswith(
        next(m["mountPath"] for m in pod["containers"][0]["volumeMounts"] if m["name"] == "runs")
    )
    assert run["data"]["lanes"] >= 4 * 8  # nodes × ranks: nobody without a lane


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_scripts_are_sound(path: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    for found in re.finditer(r"torch\.distributed\.run\"?\s+(.*?)-m shardkit_trainer(.*)", text, re.DOTALL):
        options = [
            re.sub(r"\$\{?\w+\}?", "1", word.strip("\"'")) for word in found[1].replace('"', " ").split()
        ]
        check_torchrun(options)
        settings = re.findall(r"\b([a-z]+\.[a-z_]+=\S+)", found[2].partition("</dev/null")[0])
        load_configuration(str(DEPLOYMENT / "run.toml"), [word.strip("\"'") for word in settings])
    if shutil.which("shellcheck") is not None:
        checked = subprocess.run(["shellcheck", str(path)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


def test_the_image_is_made_of_what_is_there() -> None:
    text = re.sub(r"\\\n\s*", " ", (DEPLOYMENT / "Dockerfile").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = [
        line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line
    ]
    names = {name for names in copied for name in names}
    assert all((ROOT / name).exists() for name in names)
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= names
    assert {"README.md", "LICENSE"} <= names  # the build reads them
    extras = re.search(r'"\.\[([a-z0-9,]+)\]"', text)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["project"]["optional-dependencies"])
    run = tomllib.loads((DEPLOYMENT / "run.toml").read_text())
    needed = {"train", "s3"} | ({"metrics"} if "listen" in run["log"] else set())
    needed |= {"images"} if run["model"]["kind"] == "classifier" else set()
    assert needed <= set(extras[1].split(",")), "what the run beside it uses"
    assert re.search(r"^USER 1000", text, re.MULTILINE), "a container does not run as root"


def test_deployments_name_the_image_of_this_version() -> None:
    version = ".".join(shardkit.__version__.split(".")[:2])
    named = {
        found
        for path in sorted((ROOT / "examples" / "deployment").rglob("*"))
        if path.is_file()
        for found in re.findall(r"/shardkit:([\w.]+)", path.read_text(encoding="utf-8"))
    }
    assert named == {version}


# ---- The architecture page is what the code is


def test_the_functions_that_decide_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = page.partition("## Where is it decided?")[2].partition("\n## ")[0]
    source, found = "", 0
    for name in re.findall(r"`([^`]+)`", rows):
        if "/" in name:
            source = (ROOT / name).read_text(encoding="utf-8")
        elif "." not in name:
            found += 1
            defines = rf"^(?:(?:    )?(?:def |class |static \w+ \*?))?{name}\b"
            assert re.search(defines, source, re.MULTILINE), name
    assert found >= 14
