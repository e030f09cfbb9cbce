"""What schedulers do to waits and throughput, in virtual time on vLLM's real scheduler, and what they cost.

workloads.py  what arrives: steady, burst, burst-uniform, overload, starved, tenants
policies.py   who decides: fcfs, priority, priority-fairness, tenant-fairness, or any module:Class
play.py       a process per policy that plays all workloads
figures.py    a row per workload, policy and seed; the goals
cost.py       what a queue adds to a step and to an abort, with 50,000 waiting
"""
