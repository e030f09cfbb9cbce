"""The settings of a simulation, from the file and the environment."""

import json

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.simulator.devices import DEVICES
from vllm_graft.simulator.settings import SimulationSettings, resolve_settings


class TestSettings:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("GRAFT_CONFIG", raising=False)
        return tmp_path

    def test_without_anything_steps_take_no_time(self):
        for off in ("1", "0", "no"):
            assert resolve_settings({"GRAFT_SIMULATE": off}) == SimulationSettings()
        assert resolve_settings({"GRAFT_SIMULATE": "Instant"}).named

    def test_a_variable_is_stronger_than_the_file(self, folder):
        (folder / "graft.toml").write_text('[simulated]\ndevice = "A100"\nspeed = 10\noutput_tokens = 200\n')
        from_file = resolve_settings({"GRAFT_SIMULATE": "1"})
        assert (from_file.name, from_file.device, from_file.speed) == ("A100", DEVICES["A100"], 10.0)
        given = resolve_settings({"GRAFT_SIMULATE": "H200", "GRAFT_SIMULATED_SPEED": "virtual"})
        assert (given.name, given.virtual, given.output_tokens) == ("H200", True, 200.0)

    def test_a_device_of_the_file(self, folder):
        (folder / "graft.toml").write_text('[device.mine]\nbased_on = "L40S"\nmemory_gb = 24\n')
        mine = resolve_settings({"GRAFT_SIMULATE": "mine"}).device
        assert mine is not None
        assert mine.memory_bytes == 24 * 10**9

    def test_they_travel_as_plain_data(self):
        for environ in ({}, {"GRAFT_SIMULATE": "H100", "GRAFT_SIMULATED_SPEED": "virtual"}):
            settings = resolve_settings(environ)
            assert SimulationSettings.from_dict(json.loads(json.dumps(settings.as_dict()))) == settings

    @pytest.mark.parametrize(
        ("name", "value", "says"),
        [
            ("GRAFT_SIMULATED_SPEED", "fast", "speed must be a number above 0 or 'virtual', but is 'fast'"),
            ("GRAFT_SIMULATED_SPEED", "0", "speed must be a number above 0"),
            ("GRAFT_SIMULATED_SPEED", "nan", "speed must be a number above 0"),
            ("GRAFT_SIMULATED_OUTPUT_TOKENS", "-1", "output_tokens must be a number, 0 or more"),
            ("GRAFT_SIMULATED_ACCEPTANCE", "70", "acceptance must be a number from 0 to 1, but is '70'"),
            ("GRAFT_SIMULATED_KV_BYTES", "4GB", "kv_bytes must be a whole number of bytes, 0 or more, but is '4GB'"),
            ("GRAFT_SIMULATED_KV_BYTES", "1.5", "kv_bytes must be a whole number of bytes"),
        ],
    )
    def test_a_wrong_variable_is_named(self, name, value, says):
        with pytest.raises(ConfigError, match=f"^{name}: {says}"):
            resolve_settings({"GRAFT_SIMULATE": "1", name: value})

    def test_a_wrong_line_is_named(self, folder):
        (folder / "graft.toml").write_text('[simulated]\ndevise = "H200"\n')
        with pytest.raises(
            ConfigError, match=r"graft.toml:2: \[simulated\] has no key 'devise' \(did you mean 'device'\?\)"
        ):
            resolve_settings({"GRAFT_SIMULATE": "1"})
        (folder / "graft.toml").write_text("[simulated]\ndevice = 200\n")
        with pytest.raises(ConfigError, match=r"graft.toml:2: device must be a name, but is 200"):
            resolve_settings({"GRAFT_SIMULATE": "1"})
