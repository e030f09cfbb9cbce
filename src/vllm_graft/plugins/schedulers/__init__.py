"""Schedulers that ship: which waiting request goes next.

priority_fairness.py  ``priority-fairness``: classes with linear aging, and a lane that bounds the wait
tenant_fairness.py    ``tenant-fairness``: each tenant its share of the tokens
classes.py            the class of a request, from its priority
lanes.py              the urgent lane
shares.py             tenants in the order of what they were served
tenants.py            the tenant of a request
limits.py             options within their limits
"""
