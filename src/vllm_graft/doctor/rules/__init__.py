"""One rule per file: ``CODE``, ``TITLE`` and ``check(facts)``, which yields findings."""
