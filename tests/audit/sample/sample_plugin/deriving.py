# ruff: noqa
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sample_plugin.compat import Scheduler


class Base(AsyncScheduler):
    limit = 1

    def __init__(self, *args):
        super().__init__(*args)
        self.mine = 1

    def __repr__(self):
        return ""


class Leaf(Base):
    def schedule(self):
        return self.mine + self.limit + len(self.waiting)

    @property
    def size(self):
        return 1


class Either(Scheduler):
    pass


class Unrelated:
    def schedule(self):
        return None
