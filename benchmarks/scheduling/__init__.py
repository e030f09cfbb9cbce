"""What schedulers do to waits and throughput, in virtual time on vLLM's real scheduler, and what they cost.

workloads.py    what arrives: steady, burst, burst-uniform, overload, starved, tenants
policies.py     who decides: fcfs, priority, the schedulers that ship, or any module:Class
play.py         a process per policy that plays all workloads
figures.py      a row per workload, policy and seed; the goals
page.py         the page of a run; plots.py draws
cost.py         what a queue adds to a step and to an abort, with 50,000 waiting
real.py         the burst once, by the clock on a real engine: machines.py says on what, real_engine.py plays it
real_report.py  that beside the same in virtual time
"""
