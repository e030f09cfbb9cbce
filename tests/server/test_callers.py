"""The file of callers: who a key or a header stands for, and what is wrong with a file."""

import hashlib
import os
from pathlib import Path

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.server import callers as module
from vllm_graft.server.callers import Caller, Callers, CallersFile


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


TEXT = f"""
[[caller]]
tenant = "acme"
key_sha256 = ["{hashed("one")}", "{hashed("two").upper()}"]
best_priority = 2
priority = 3

[[caller]]
tenant = "trial"
key_sha256 = "{hashed("three")}"
best_priority = 5
"""


def read(tmp_path: Path, text: str) -> Callers:
    path = tmp_path / "callers.toml"
    path.write_text(text)
    return Callers.read(path)


def who(callers: Callers, **headers: str) -> Caller | None:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return callers.identify(lambda name: given.get(name.lower(), ""))


def test_a_key_stands_for_its_tenant(tmp_path):
    """With or without the word before it; several keys may stand for one."""
    callers = read(tmp_path, TEXT)
    acme = Caller("acme", 2, 3)
    assert who(callers, authorization="Bearer one") == acme
    assert who(callers, authorization="bearer  two") == acme
    assert who(callers, authorization="one") == acme
    assert who(callers, authorization="Bearer three") == Caller("trial", 5, 5)


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer ", "Bearer four", hashed("one"), "Bearer \udcff"])
def test_who_has_no_key_of_the_file_is_nobody(tmp_path, given):
    """Also who knows a key's hash."""
    assert who(read(tmp_path, TEXT), authorization=given) is None


def test_others_may_be_let_in(tmp_path):
    """As one tenant, with a priority of their own."""
    callers = read(tmp_path, TEXT + "[others]\nbest_priority = 4\n")
    assert who(callers, authorization="Bearer four") == Caller("others", 4, 4)
    assert who(callers) == Caller("others", 4, 4)


def test_a_gateway_may_name_the_tenant(tmp_path):
    """In a header of its own; who is not in the file is one of the others, under the name that the gateway gave."""
    text = 'tenant_header = "X-Tenant"\n[[caller]]\ntenant = "acme"\nbest_priority = 1\n'
    assert who(read(tmp_path, text), x_tenant="acme") == Caller("acme", 1, 1)
    assert who(read(tmp_path, text), x_tenant="else") is None
    callers = read(tmp_path, text + '[others]\ntenant = "nobody"\nbest_priority = 5\n')
    assert who(callers, x_tenant="else") == Caller("else", 5, 5)
    assert who(callers) == Caller("nobody", 5, 5)


def test_a_tenant_header_means_nothing_unless_the_file_names_it(tmp_path):
    """Else a client would choose its own tenant."""
    assert who(read(tmp_path, TEXT), x_tenant="acme") is None


@pytest.mark.parametrize(("asked", "given"), [(0, 3), (-7, 3), (1, 2), (2, 2), (3, 3), (9, 9)])
def test_a_priority_is_capped(asked, given):
    """Better than allowed becomes what is allowed; worse stays; none named is the usual one."""
    assert Caller("acme", 2, 3).cap(asked) == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenant = 1\n", "the file: unknown key 'tenant'"),
        ("", "has no caller"),
        ("[caller]\n", "callers are an array of tables"),
        ("[[caller]]\n", "caller 1 has no tenant"),
        ('[[caller]]\ntenant = "a"\n', r"caller 1 \(a\) has no key"),
        ('[[caller]]\ntenant = "a"\nkey_sha256 = "secret"\n', "key_sha256 must be SHA-256 hashes"),
        ('[[caller]]\ntenant = "a"\nkey = "secret"\n', "unknown key 'key'"),
        (f'[[caller]]\ntenant = "a"\nkey_sha256 = "{hashed("k")}"\nbest_priority = 0\n', "best_priority must be"),
        (f'[[caller]]\ntenant = "a"\nkey_sha256 = "{hashed("k")}"\nbest_priority = true\n', "best_priority must be"),
        (
            f'[[caller]]\ntenant = "a"\nkey_sha256 = "{hashed("k")}"\nbest_priority = 3\npriority = 2\n',
            "is better than",
        ),
        (f'[[caller]]\ntenant = "a"\nkey_sha256 = ["{hashed("k")}", "{hashed("k")}"]\n', "uses the same key as a"),
        ('tenant_header = "X"\n[[caller]]\ntenant = "a"\n[[caller]]\ntenant = "a"\n', "there are two callers 'a'"),
        ("tenant_header = 3\n", "tenant_header must be a string"),
        ("others = 3\n", "`others` must be a table"),
        ("[others]\nkey_sha256 = 3\n", "others: unknown key 'key_sha256'"),
        ("a = [\n", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path, text, message):
    """And with the next step; a key itself is never repeated."""
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, text)
    assert "callers.toml" in str(caught.value)
    assert "Next: " in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """By name."""
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        Callers.read(tmp_path / "none.toml")


def test_a_changed_file_takes_effect_while_the_server_runs(tmp_path, monkeypatch, caplog):
    """A file that has become wrong, or is gone, changes nothing and is said."""
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    path = tmp_path / "callers.toml"
    path.write_text(TEXT)
    file = CallersFile(str(path), Plan())

    def three() -> Caller | None:
        # A look that is under way may have read the file before it was changed.
        for _ in range(2):
            file.now()
            assert file._looking is not None
            file._looking.join()
        return who(file.now(), authorization="three")

    assert three() == Caller("trial", 5, 5)
    path.write_text(TEXT.replace("trial", "paying"))
    os.utime(path, (1, 1))
    assert three() == Caller("paying", 5, 5)
    path.write_text("nonsense")
    assert three() == Caller("paying", 5, 5)
    assert "the callers stay as they were" in caplog.text
    path.unlink()
    assert three() == Caller("paying", 5, 5)
    path.write_text(TEXT)
    assert three() == Caller("trial", 5, 5)


def test_a_changed_file_must_fit_the_scheduler_too(tmp_path, caplog):
    """Else clients would choose their tenant from the next look on, under the name that the scheduler reads."""
    path = tmp_path / "callers.toml"
    path.write_text(TEXT)
    options = {"tenant_from": ["xargs"], "tenant_key": "tenant"}
    file = CallersFile(str(path), Plan((PlanItem("scheduler", "fair", "m:C", "p", ("engine",), options),)))
    path.write_text('tenant_key = "team"\n' + TEXT)
    file.look()
    assert file.now().tenant_key == "tenant"
    assert "the callers stay as they were" in caplog.text
    assert "reads tenants under 'tenant'" in caplog.text


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("make", "message"),
    [(_pipe, "is not a regular file"), (Path.mkdir, "Is a directory"), (_huge, "is larger than 8 MiB")],
    ids=["pipe", "folder", "huge"],
)
def test_what_is_no_file_of_callers_is_refused_at_once(tmp_path, make, message, caplog):
    """At the start with an error; while the server runs, the callers stay as they were."""
    path = tmp_path / "callers.toml"
    path.write_text(TEXT)
    file = CallersFile(str(path), Plan())
    path.unlink()
    make(path)
    with pytest.raises(ConfigError, match=message):
        Callers.read(path)
    file.look()
    assert who(file.now(), authorization="three") == Caller("trial", 5, 5)
    assert message in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tenant_from": ["cache_salt", "xargs"], "tenant_key": "tenant"}, "reads tenants from"),
        ({"tenant_from": ["xargs"], "tenant_key": "team"}, "reads tenants under 'team'"),
    ],
)
def test_a_scheduler_that_would_not_see_the_callers_is_refused(tmp_path, options, message):
    """Else clients' own words would decide, and nothing would show it."""
    callers = read(tmp_path, TEXT)
    good = {"tenant_from": ["xargs", "cache_salt"], "tenant_key": "tenant"}
    for given in (good, {}):
        callers.check_plan(Plan((PlanItem("scheduler", "fair", "m:C", "p", ("engine",), given),)))
    with pytest.raises(ConfigError, match=message):
        callers.check_plan(Plan((PlanItem("scheduler", "fair", "m:C", "p", ("engine",), options),)))


@pytest.mark.parametrize("text", ["a = " + "[" * 3000, "[others]\npriority = " + "1" * 5000], ids=["deep", "long"])
def test_a_file_that_python_cannot_read_is_refused(tmp_path, text):
    """As a fault of the file, with its place."""
    with pytest.raises(ConfigError, match=r"is not valid TOML"):
        read(tmp_path, text)


@pytest.mark.parametrize("key", ["key_header", "tenant_header"])
@pytest.mark.parametrize("name", ["X-Mandant-ü", "X Tenant", "X-租户", "a:b"])
def test_a_header_that_http_cannot_send_is_refused(tmp_path, key, name):
    """It would be looked for in vain, or fail with every request."""
    with pytest.raises(ConfigError, match=f"{key} must be the name of a header"):
        read(tmp_path, f'{key} = "{name}"\n{TEXT}')


def test_keys_and_tenants_may_have_any_letters(tmp_path):
    """A client sends UTF-8; HTTP headers are decoded as latin-1."""
    text = f'tenant_header = "X-Tenant"\n[[caller]]\ntenant = "café"\nkey_sha256 = "{hashed("clé")}"\n'
    callers = read(tmp_path, text)
    assert who(callers, authorization="Bearer " + "clé".encode().decode("latin-1")) == Caller("café", 1, 1)
    assert who(callers, x_tenant="café".encode().decode("latin-1")) == Caller("café", 1, 1)
    assert who(callers, x_tenant="café") == Caller("café", 1, 1)
