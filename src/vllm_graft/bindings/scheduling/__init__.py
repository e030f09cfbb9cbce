"""The scheduler point: vLLM's own scheduler with a planned queue, or a planned policy.

scheduler.py        vLLM's scheduler class, with the planned item in place of its waiting queue
admission_queue.py  an ``AdmissionQueue`` behind vLLM's ``RequestQueue``, and first come, first served when it fails
policy.py           a ``SchedulingPolicy``: called before each step, its schedule validated and carried out
statistics.py       requests, waits and tokens per label, published to the other processes of the server
clock.py            the clock of waiting requests, and the rate at which they are admitted
request_fields.py   what a queue or a policy sees of one of vLLM's requests
"""
