"""The record that each process keeps of itself: the state of every planned item, and what its calls cost.

- ``Ledger``     this process's record: facts as JSON, counters as shared memory that outlive the process
- ``Meter``      counts and times the calls of one hook against its budget
- ``Guard``      calls a plugin; one that raises or overruns repeatedly is quarantined
- ``StatisticsWriter``, ``StatisticsReader``  the load and the queue statistics that engine cores share
- ``Watch``      watches the process: signs of life, stalls, records that could not be written
- ``runs``       reads the records of every server on this machine
- ``missing``    compares processes with the plan: what one lacks, as findings
- ``ProcessRow``, ``StatusDocument``  a process and a server, as processes and commands exchange them

Counting does no input or output: a counter is a cell of a memory-mapped file, written by one addition.
"""

from vllm_graft.ledger.comparison import missing
from vllm_graft.ledger.counters import Cells, Meter, MeterReading
from vllm_graft.ledger.folder import state_folder
from vllm_graft.ledger.guard import Guard
from vllm_graft.ledger.ledger import Ledger, current
from vllm_graft.ledger.queue_statistics import LabelStatistics, QueueSnapshot, StatisticsReader, StatisticsWriter
from vllm_graft.ledger.reading import ProcessView, RunView, read_processes, runs
from vllm_graft.ledger.record import ItemState, Record
from vllm_graft.ledger.status import ProcessRow, StatusDocument, UnrecordedProcess, status_document
from vllm_graft.ledger.watch import Progress, Watch

__all__ = [
    "Cells",
    "Guard",
    "ItemState",
    "LabelStatistics",
    "Ledger",
    "Meter",
    "MeterReading",
    "ProcessRow",
    "ProcessView",
    "Progress",
    "QueueSnapshot",
    "Record",
    "RunView",
    "StatisticsReader",
    "StatisticsWriter",
    "StatusDocument",
    "UnrecordedProcess",
    "Watch",
    "current",
    "missing",
    "read_processes",
    "runs",
    "state_folder",
    "status_document",
]
