# ruff: noqa
def fresh(self):
    return self.things
