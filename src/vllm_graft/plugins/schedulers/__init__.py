"""The schedulers that ship: admission queues, each with the parts that it is made of.

priority_fairness.py  ``priority-fairness``: classes with linear aging, and a lane that bounds the wait
tenant_fairness.py    ``tenant-fairness``: each tenant its share of the tokens
priority_classes.py   the class of a request, and the classes that are refused under load
urgent_lane.py        the lane of requests that have waited too long
tenants.py            the tenant of a request, and tenants in the order of the tokens they were served
options.py            number options within their limits
"""
