"""Options: defaults, ranges, and messages that name key, value and remedy."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_scape.config import AdamSOptions, ScapeConfigError, ScapeOptions, parse_options


def test_defaults_are_valid_and_frozen() -> None:
    options = parse_options({}, ScapeOptions)
    assert options.sparsity == 0.99 and options.normalizer == "ema" and options.warmup_steps == 100
    with pytest.raises(ValueError):
        options.sparsity = 0.5


def test_every_option_tells_its_meaning() -> None:
    assert all(field.description for field in ScapeOptions.model_fields.values())


BAD = {
    "unknown": ({"sparsty": 0.9}, "optimizer.params.sparsty = 0.9"),
    "high": ({"sparsity": 1.0}, "optimizer.params.sparsity = 1.0"),
    "negative": ({"sparsity": -0.1}, "optimizer.params.sparsity = -0.1"),
    "bool": ({"sparsity": True}, "optimizer.params.sparsity = True"),
    "text": ({"lr": "1e-3"}, "optimizer.params.lr = '1e-3'"),
    "nan": ({"eps": float("nan")}, "optimizer.params.eps = nan"),
    "inf": ({"lr": float("inf")}, "optimizer.params.lr = inf"),
    "fraction": ({"warmup_steps": 1.5}, "optimizer.params.warmup_steps = 1.5"),
    "choice": ({"normalizer": "rms"}, "optimizer.params.normalizer = 'rms'"),
    "short": ({"betas": [0.9]}, "optimizer.params.betas"),
    "block": ({"selection": "block", "block_size": 250}, "use a multiple of 100"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_option_names_key_value_and_remedy(name: str) -> None:
    params, expected = BAD[name]
    with pytest.raises(ScapeConfigError) as error:
        parse_options(params, ScapeOptions)
    assert expected in str(error.value) and "Remedy: " in str(error.value)


@pytest.mark.parametrize(
    ("params", "remedy"),
    [
        ({"lr": "5e-4"}, "write 5e-4 without quotes"),
        ({"sparsity": 99}, "write 0.99: it is a share below 1"),
        ({"sparsity": 1.0}, "write 0.99: it is a share below 1"),
        ({"betas": [0.9]}, "give two numbers, such as [0.9, 0.95]"),
        ({"residual_device": "gpu"}, "'cpu' saves GPU memory"),
    ],
    ids=str,
)
def test_the_remedy_is_what_to_write(params: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ScapeConfigError) as error:
        parse_options(params, ScapeOptions)
    assert remedy in error.value.remedy


def test_two_options_that_do_not_go_together_are_both_shown_and_no_others() -> None:
    with pytest.raises(ScapeConfigError) as error:
        parse_options({"lr": 1e-3, "ballots": True, "residual_device": "cpu"}, ScapeOptions)
    assert error.value.value == {"ballots": True, "residual_device": "cpu"}
    with pytest.raises(ScapeConfigError) as error:  # its message has "keeps" in it
        parse_options({"eps": 1e-8, "selection": "block", "block_size": 250}, ScapeOptions)
    assert error.value.value == {"block_size": 250}


def test_unfilled_auto_is_explained() -> None:
    with pytest.raises(ScapeConfigError, match="Hugging Face"):
        parse_options({"lr": "auto"}, ScapeOptions)


def test_group_errors_name_the_group() -> None:
    import torch

    from deepspeed_scape import Scape

    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.ones(1)], "lr": -1.0}]
    with pytest.raises(ScapeConfigError, match=r"param_groups\[1\]\.lr = -1\.0"):
        Scape(groups)


def test_an_option_of_the_run_inside_a_group_is_refused() -> None:
    import torch

    from deepspeed_scape import Scape

    with pytest.raises(ScapeConfigError, match=r"param_groups\[0\]\.sparsity = 0\.5.*holds for the whole run"):
        Scape([{"params": [torch.zeros(1)], "sparsity": 0.5}])


def test_scape_alone_says_what_it_needs() -> None:
    import torch

    from deepspeed_scape import Scape

    with pytest.raises(RuntimeError, match="deepspeed.initialize"):
        Scape([torch.zeros(1)]).step()


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5), st.floats(), st.text(max_size=3), st.lists(st.floats(), max_size=3)
)


@given(st.dictionaries(st.sampled_from([*ScapeOptions.model_fields, "junk"]), VALUES))
def test_any_params_are_parsed_or_refused_by_our_error(params: dict) -> None:
    for model in (ScapeOptions, AdamSOptions):
        try:
            parse_options(params, model)
        except ScapeConfigError as error:
            assert "Remedy: " in str(error)


def test_every_bad_option_is_told() -> None:
    params = {"sparsity": 2.0, "betas": [1, "x"], "sparcity": 0.9, "lr": -1.0}
    with pytest.raises(ScapeConfigError) as error:
        parse_options(params, ScapeOptions)
    keys = [line.split(" = ")[0].rpartition(".")[2] for line in str(error.value).split("\n")]
    assert sorted(keys) == sorted(params)
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_an_unknown_option_gets_a_near_name_or_none_and_the_list_once() -> None:
    with pytest.raises(ScapeConfigError) as error:
        parse_options({"fused": True, "LR": 1e-3, "amsgrad": False}, ScapeOptions)
    remedies = {key.rpartition(".")[2]: remedy for key, _, _, remedy in error.value.refusals}
    assert remedies["fused"].startswith("remove it; known options are lr, betas")
    assert remedies["LR"] == "write lr" and remedies["amsgrad"] == "remove it"
