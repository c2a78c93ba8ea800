"""Tasks for workers under test; run as `python -m tests.pipelines.worker_tasks CHANNEL`, like `pipelines.worker`."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from pipelines import worker
from tpurec.errors import DataError, TpurecError

KILL = ".kill"
KILLED_IN_STEP = 24  # the number of steps done before it


def gather(order, channel):
    """Join the world, say so, and exchange words of different lengths and types."""

    from pipelines.world import joined

    with joined(order["rank"], order["num_workers"], order["init_method"], order["num_workers"]) as world:
        words = world.gather_json({"rank": world.rank, "text": "é" * world.rank})
        arrays = world.gather_arrays(np.arange(world.rank, dtype=np.float32))
        empty = world.gather_arrays(np.empty(0, dtype=np.int64))
    return {"words": words, "arrays": [a.tolist() for a in arrays], "empty": [e.tolist() for e in empty]}


def counted(order, channel):
    """Fail in the way that the options name until a file has been written so often; then succeed."""
    path, rank = order["options"]["path"], order["rank"]
    if rank == 0:
        channel.send("progress", [10, 0.5])
        channel.send("log", "rank 0 says")
        print("printed by rank 0", flush=True)
    if rank == 1:
        with open(path, "a+") as stream:
            stream.write("x")
            stream.seek(0)
            tries = len(stream.read())
        if tries <= order["options"]["failures"]:
            how = order["options"]["how"]
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "problem":
                raise DataError("file x: column 'y' is gone.", "Put it back.")
            elif how == "full":
                raise OSError(28, "No space left on device", "run/metrics.jsonl")
            elif how == "large":
                np.empty(2**62, dtype=np.uint8)
            elif how == "defect":
                raise ZeroDivisionError("of mine")
            os._exit(7)
    elif order["options"].get("wait") and not os.path.exists(path + ".go"):
        time.sleep(60)  # stuck in a collective, as it were
    return {"done": True}


def bereft(order, channel):
    """Rank 1 is killed in the first try; rank 0 fails of that as a checkpoint does, and ends before rank 1 does."""
    sign = Path(order["options"]["sign"])
    if sign.exists():
        return {"done": True}
    ready = sign.with_suffix(".ready")
    if order["rank"] == 1:
        ready.touch()
        time.sleep(0.7)
        sign.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not ready.exists():
        time.sleep(0.01)
    raise TpurecError("step-1: cannot be written: another rank is gone") from RuntimeError("connection reset")


def train_until_killed(order, channel):
    """Train; the RUN's file `.kill` names ranks that are killed, once, in the middle between two checkpoints."""
    import psutil

    from pipelines.train_loop import TrainLoop

    sign = Path(order["options"]["run"]) / KILL
    victims = json.loads(sign.read_text()) if sign.exists() else []
    if order["rank"] in victims:
        step_as_ever = TrainLoop.step

        def step(loop, ready, position):
            step_as_ever(loop, ready, position)
            if position.step == KILLED_IN_STEP:
                sign.unlink(missing_ok=True)
                if len(victims) == order["num_workers"]:  # of all, and the launcher, at once
                    launcher = psutil.Process(os.getppid())
                    others = [child for child in launcher.children() if child.pid != os.getpid()]
                    for process in (launcher, *others):
                        process.kill()
                os.kill(os.getpid(), signal.SIGKILL)

        TrainLoop.step = step
    return train(order, channel)


def hang(order, channel):
    """Tell the process's number, and wait for ever."""
    channel.send("log", json.dumps([order["rank"], os.getpid()]))
    time.sleep(300)


train = worker.TASKS["train"]
worker.TASKS |= {"gather": gather, "counted": counted, "bereft": bereft, "hang": hang, "train": train_until_killed}

if __name__ == "__main__":
    code = worker.main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)
