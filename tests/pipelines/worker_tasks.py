"""Tasks for workers under test; run as `python -m tests.pipelines.worker_tasks CHANNEL`, like `pipelines.worker`."""

import json
import os
import signal
import sys
import time

from pipelines import worker
from tpurec.errors import DataError


def gather(order, channel):
    """Join the world, say so, and exchange words of different lengths and types."""
    import numpy as np

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
            elif how == "defect":
                raise ZeroDivisionError("of mine")
            os._exit(7)
    elif order["options"].get("wait") and not os.path.exists(path + ".go"):
        time.sleep(60)  # stuck in a collective, as it were
    return {"done": True}


def hang(order, channel):
    """Tell the process's number, and wait for ever."""
    channel.send("log", json.dumps([order["rank"], os.getpid()]))
    time.sleep(300)


worker.TASKS |= {"gather": gather, "counted": counted, "hang": hang}

if __name__ == "__main__":
    code = worker.main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)
