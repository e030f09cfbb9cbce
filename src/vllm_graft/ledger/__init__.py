"""What each process says of itself: what it applied, called and refused, and how long it took.

- ``Ledger``    this process's record: facts as JSON, counters as shared memory that outlive the process
- ``Meter``     counts and times the calls of one hook against its budget
- ``Guard``     calls a plugin; one that raises or overruns again and again is put aside
- ``StatisticsWriter``, ``StatisticsReader``  the load and the queue statistics that engine cores share
- ``Watch``     looks after the process: signs of life, stalls, records that could not be written
- ``runs``      reads the records of every server on this machine
- ``missing``   compares records with the plan: what a process lacks, as findings

Counting does no input or output: a counter is a cell of a memory-mapped file, written by one addition.
"""

from vllm_graft.ledger.cells import Cells
from vllm_graft.ledger.folder import state_folder
from vllm_graft.ledger.guard import Guard
from vllm_graft.ledger.ledger import Ledger, current
from vllm_graft.ledger.meters import Meter, Reading
from vllm_graft.ledger.queue_statistics import LabelStatistics, QueueSnapshot, StatisticsReader, StatisticsWriter
from vllm_graft.ledger.reading import ProcessView, Records, RunView, missing, runs
from vllm_graft.ledger.record import ItemState, Record
from vllm_graft.ledger.watch import Progress, Watch

__all__ = [
    "Cells",
    "Guard",
    "ItemState",
    "LabelStatistics",
    "Ledger",
    "Meter",
    "ProcessView",
    "Progress",
    "QueueSnapshot",
    "Reading",
    "Record",
    "Records",
    "RunView",
    "StatisticsReader",
    "StatisticsWriter",
    "Watch",
    "current",
    "missing",
    "runs",
    "state_folder",
]
