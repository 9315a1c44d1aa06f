"""The ssh and Slurm scripts run as they are, on "nodes" that are processes here: ssh, srun and scontrol are stand-ins.

What a cluster adds (networks, schedulers, drained nodes) is not shown by this; what a script gets wrong by itself is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from tests.command_line import output_of
from tests.drills import drill_cases
from tests.servers.serving import free_port

DEPLOYMENT = Path(__file__).parents[2] / "examples" / "deployment"
HAS_RAY = importlib.util.find_spec("ray") is not None

COMMAND = f"exec {sys.executable} -c 'from shardkit_tools.main import run; run()' \"$@\"\n"
SSH = ["bash", str(DEPLOYMENT / "ssh" / "train.sh")]
STAND_INS = {
    "ssh": """#!/bin/bash
while [[ "$1" == -* ]]; do if [[ "$1" == -o ]]; then shift 2; else shift; fi; done
shift
exec bash -c "$*"
""",
    "srun": """#!/bin/bash
nodes=$SLURM_JOB_NUM_NODES
while [[ "$1" == -* ]]; do case "$1" in --nodes=*) nodes=${1#*=} ;; -w) shift ;; esac; shift; done
pids=()
trap 'kill "${pids[@]}" 2>/dev/null' TERM
for ((i = 0; i < nodes; i++)); do "$@" & pids+=($!); done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
""",
    "scontrol": """#!/bin/bash
printf '127.0.0.1\\nlocalhost\\n'
""",
    "shardkit": f"#!/bin/bash\n{COMMAND}",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With stand-ins for what a cluster has, and the Python of the tests under the names that scripts use."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STAND_INS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    python = Path(sys.executable)
    path = os.pathsep.join([str(folder), str(python.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "VENV": str(python.parent.parent), "RANKS_PER_NODE": "1",
            "CACHE": str(tmp_path / "cache"), "PORT": str(free_port()), "PYTHONPATH": os.pathsep.join(sys.path),
            "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "77",
            "SLURM_CPUS_PER_TASK": "1"}  # fmt: skip


def configuration(folder: Path, dataset: str, epochs: int) -> Path:
    path = folder / "run.toml"
    path.write_text(
        f'[run]\ndirectory = "{folder / "run"}"\nepochs = {epochs}\n\n'
        f'[data]\ndataset = "{dataset}"\nglobal_batch = 64\nlanes = 8\n\n'
        '[model]\nkind = "classifier"\nwidth = 8\nstages = 1\n\n[checkpoint]\nevery = 10\n'
    )
    return path


def execute(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def worlds(folder: Path) -> list[int]:
    """Ranks of each start."""
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return [event["ranks"] for event in events if event["event"] == "start"]


@pytest.mark.slow
def test_ssh_trains_on_two_nodes(digits: dict[str, str], tmp_path: Path, environment: dict[str, str]) -> None:
    config = configuration(tmp_path, digits["train"], 1)
    execute([*SSH, str(config), "127.0.0.1", "localhost"], environment)
    assert worlds(tmp_path) == [2]
    output_of("audit", tmp_path / "run")


def test_ssh_starts_the_same_command_on_one_node(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "bin" / "shardkit").write_text('#!/bin/bash\necho "$@"\n')
    said = execute(
        [*SSH, "run.toml", "localhost", "--", "log.every=5"], {**environment, "VENV": str(tmp_path)}
    )
    port, cache = environment["PORT"], f"data.cache={environment['CACHE']} data.cache_size=800GiB"
    meeting = f"--nproc=1 --nnodes=1 --rendezvous=localhost:{port} --max-restarts=20"
    assert said.split("\n")[0].strip() == f"localhost: train run.toml {cache} {meeting} log.every=5"


@pytest.mark.slow
def test_slurm_trains_and_audits(digits: dict[str, str], tmp_path: Path, environment: dict[str, str]) -> None:
    """With fewer ranks, another run directory and another port than the placeholders."""
    text = (DEPLOYMENT / "slurm" / "train.sbatch").read_text()
    for placeholder, here in (("--nproc=8", "--nproc=1"), ("/runs/cats", str(tmp_path / "run")),
                              (":29500", f":{environment['PORT']}")):  # fmt: skip
        assert placeholder in text
        text = text.replace(placeholder, here)
    script = tmp_path / "train.sbatch"
    script.write_text(text)
    config = configuration(tmp_path, digits["train"], 1)
    said = execute(["bash", str(script), str(config), f"data.cache={tmp_path / 'cache'}"], environment)
    assert re.search(r"epoch 0 ", said), "the audit at the end of the script"
    assert worlds(tmp_path) == [2]


RAY = """#!/bin/bash
[ "$1" = status ] && exec test -e "$CLUSTER"
echo "$2 $RAY_AUTH_MODE $RAY_AUTH_TOKEN" >>"$CLUSTER"
exec sleep infinity
"""
"""Stand-in for a node of Ray, which notes how it was started."""

ON_CLUSTER = f"""#!/bin/bash
if [ "$1" = build ]; then
    until [ "$(wc -l <"$CLUSTER")" = 2 ]; do sleep 0.1; done
    [[ "$*" =~ (.*)" --engine ray"(" --address "[^ ]*)(.*) ]]
    echo "build${{BASH_REMATCH[2]}} $RAY_AUTH_MODE $RAY_AUTH_TOKEN" >>"$CLUSTER"
    set -- ${{BASH_REMATCH[1]}}${{BASH_REMATCH[3]}}
fi
{COMMAND}"""
"""Stand-in for the command, which builds without the cluster when its nodes have started."""


@pytest.mark.drill
@pytest.mark.slow
@pytest.mark.parametrize("ray", drill_cases(["stand-in", "real"], [0]))
def test_slurm_builds_on_a_cluster_with_a_token_of_its_own(
    tmp_path: Path, environment: dict[str, str], ray: str
) -> None:
    """On a real cluster in `make drills`; test_ray_engine.py has commands on one with a token."""
    cluster = tmp_path / "cluster"
    if ray == "stand-in":
        for name, text in (("ray", RAY), ("shardkit", ON_CLUSTER)):
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
    elif not HAS_RAY:
        pytest.skip("ray is not installed: pip install ray")
    for name in ("cat", "dog"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        for number in range(40):
            (tmp_path / "texts" / name / f"{number}.txt").write_text(f"{name} {number}")
    said = execute(
        ["bash", str(DEPLOYMENT / "slurm" / "build.sbatch"), str(tmp_path / "texts"), str(tmp_path / "root")],
        {**environment, "TMPDIR": "/tmp", "CLUSTER": str(cluster)},
    )
    assert "Token authentication is enabled" not in said, "it was chosen, not found"
    token = re.search(r"\b[0-9a-f]{64}\b(?!\.)", re.sub(r"sha256:[0-9a-f]{64}", "", said))
    assert token is None, "the token is printed nowhere"
    assert len(shardkit.open(str(tmp_path / "root"))) == 80
    assert list((tmp_path / "root" / "tmp").iterdir()) == []
    if ray == "stand-in":
        head, worker, build = cluster.read_text().splitlines()
        assert re.fullmatch(r"--head token [0-9a-f]{64}", head)
        meeting, rest = f"--address=127.0.0.1:{environment['PORT']}", head.removeprefix("--head")
        assert (worker, build) == (meeting + rest, f"build {meeting.replace('=', ' ')}{rest}")
