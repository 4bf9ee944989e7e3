"""Configurations and numbers that cannot be trained or priced with."""

from __future__ import annotations

from bad_input.making import Bad, command, trained

ACCOUNT = (
    "account",
    "--rate",
    "0.01",
    "--steps",
    "20",
    "--noise-multiplier",
    "2",
    "--delta",
    "1e-6",
)
CALIBRATE = ("calibrate", "--rate", "0.1", "--steps", "20", "--epsilon", "1", "--delta", "1e-6")
PLAN = ("plan", "--users", "100", "--records-per-user", "4", "--epsilon", "1", "--delta", "1e-6",
        "--steps", "10", "--compute", "10")  # fmt: skip

LOOK = (
    '{"format": 1, "what": "a look", "value": 1.0, '
    '"event": {"type": "GaussianDpEvent", "noise_multiplier": 0.1}}'
)


def _file(name: str, says: str, content: str | bytes) -> Bad:
    return Bad(
        name=name,
        make=lambda place: ("train", place.write("run.toml", content), "--out", "run"),
        says=says,
    )


def _section(name: str, says: str, old: str, new: str) -> Bad:
    """A good configuration with a part of its text replaced."""
    return Bad(
        name=name,
        make=lambda place: (
            "train",
            place.write("run.toml", place.config().read_text().replace(old, new)),
            "--out",
            "run",
        ),
        says=says,
    )


TABLE: list[Bad] = [
    # The file
    command(
        "no configuration", "nowhere.toml: no such file", "train", "nowhere.toml", "--out", "r"
    ),
    Bad(
        name="a folder for a configuration",
        make=lambda place: ("train", place.folder, "--out", "run"),
        says="no such file",
    ),
    _file("no TOML", "not valid TOML", "[data\n"),
    _file("a configuration that is no text", "not valid TOML", b"\xff\xfe\x00"),
    _file("an empty configuration", "section [data] is missing", ""),
    _section("[train] for [training]", "did you mean [training]?", "[training]", "[train]"),
    _section("a section too many", "unknown section [zzz]", "[model]", "[zzz]\n[model]"),
    _file("a section that is a number", "data = 3", "data = 3\nmodel = 4\n"),
    # Keys
    trained("a misspelt key", "did you mean 'sequence_length'?", data="sequence_lenght = 16"),
    trained("a misspelt needed key", "by 'num_user'", privacy="num_users =\nnum_user = 20"),
    trained("a misspelt privacy key", "did you mean 'noise_multiplier'?", privacy="noise_mult = 1"),
    trained("a key of another section", "belongs into section [privacy]", training="delta = 0.1"),
    trained("a key like nothing", "known keys:", data="zzz = 1"),
    trained("steps in words", "training.steps = 'many'", training="steps = 'many'"),
    trained("a very long value", "...", training="steps = '" + "x" * 5000 + "'"),
    trained("an unknown sampler", "'weighted'", privacy="sampler = 'weighted'"),
    trained("an unknown noise", "'cauchy'", privacy="noise = 'cauchy'"),
    trained("an unknown clipping", "'gentle'", privacy="clipping = 'gentle'"),
    trained("an unknown update", "'federated'", training="update = 'federated'"),
    trained("an unknown adjacency", "adjacency", privacy="adjacency = 'near'"),
    trained("a key of another unit", "has no meaning", privacy="expected_batch_size = 4"),
    # Privacy
    trained("epsilon zero", "epsilon=0", privacy="epsilon = 0.0"),
    trained("epsilon below zero", "epsilon=-1", privacy="epsilon = -1.0"),
    trained("epsilon no number", "epsilon=nan", privacy="epsilon = nan"),
    trained("epsilon without end", "epsilon=inf", privacy="epsilon = inf"),
    trained("epsilon and noise", "exactly one of epsilon", privacy="noise_multiplier = 1.0"),
    trained("neither epsilon nor noise", "exactly one of epsilon", privacy="epsilon ="),
    trained("an epsilon out of reach", "below 0.0001, the smallest", privacy="epsilon = 1e-9"),
    trained("delta zero", "delta=0", privacy="delta = 0.0"),
    trained("delta one", "delta=1", privacy="delta = 1.0"),
    trained("delta no number", "delta=nan", privacy="delta = nan"),
    trained("no noise", "protects nobody", privacy="epsilon =\nnoise_multiplier = 0.0"),
    trained(
        "noise below zero", "noise_multiplier=-1", privacy="epsilon =\nnoise_multiplier = -1.0"
    ),
    trained(
        "noise without end", "noise_multiplier=inf", privacy="epsilon =\nnoise_multiplier = inf"
    ),
    trained("no bound", "clip_norm=inf", privacy="clip_norm = inf"),
    trained("a clip norm of zero", "clip_norm=0", privacy="clip_norm = 0.0"),
    trained("a clip norm below zero", "clip_norm=-1", privacy="clip_norm = -1.0"),
    trained("a clip norm that is no number", "clip_norm=nan", privacy="clip_norm = nan"),
    trained(
        "no clip norm",
        "clip_norm is missing",
        privacy="clip_norm =\nclipping = 'normalised'",
    ),
    trained(
        "a cohort of nobody", "at least 1 and at most all", privacy="expected_cohort_size = 0.5"
    ),
    trained("more sampled than there are", "at least 1 and", privacy="expected_cohort_size = 50"),
    trained("no users", "num_users=0", privacy="num_users = 0"),
    trained("one user", "num_users=1", privacy="num_users = 1\nexpected_cohort_size = 1"),
    trained("a group of nobody", "group_size", privacy="group_size = 0"),
    trained("half a record", "group_size", privacy="group_size = 2.5"),
    trained("no step", "steps", training="steps = 0"),
    trained("not private, with a target", "non_private=True", privacy="non_private = true"),
    trained("a paid file that is not there", "no such file", privacy="paid = ['look.json']"),
    trained("a paid file that is none", "not a paid item", privacy="paid = ['run.toml']"),
    Bad(
        name="more paid than there is",
        make=lambda place: (
            place.write("look.json", LOOK),
            *("train", place.config(privacy="paid = ['look.json']"), "--out", "run"),
        )[1:],
        says="leaves nothing for the steps",
    ),
    trained("a delta that protects nobody", "above 1/num_users=0.05", privacy="delta = 0.5"),
    trained(
        "not private, without noise or target",
        "0 for the baseline",
        privacy="epsilon =\nnon_private = true",
    ),
    trained(
        "a hypothetical cohort of more users than there are",
        "hypothetical_cohort_size=5000 of hypothetical_users=20",
        privacy="hypothetical_cohort_size = 5000",
    ),
    trained(
        "a sampler of another unit",
        "with unit = 'record'. Known: 'cyclic-poisson', 'min-separated', 'poisson', 'shuffled'.",
        privacy="unit = 'record'\nexpected_cohort_size =\nexpected_batch_size = 4\n"
        "sampler = 'allocation'",
    ),
    trained(
        "an order without a selection",
        "[data] selection is missing: sampler = 'min-separated'",
        privacy="unit = 'record'\nexpected_cohort_size =\nsampler = 'min-separated'",
    ),
    Bad(
        name="records of several owners, one by one",
        make=lambda place: (
            "train",
            place.config(
                data=f"store = '{place.shared.owned_by_two}'",
                privacy="unit = 'record'\nexpected_cohort_size =\ngroup_size =",
            ),
            *("--out", "run"),
        ),
        says="several owners",
    ),
    # Keys that would be ignored
    trained(
        "measured often on nobody",
        "without [data] evaluation: remove it",
        training="evaluate_every = 2",
    ),
    trained(
        "a secret measurement of nobody",
        "evaluation_private has no meaning without [data] evaluation",
        data="evaluation_private = true",
    ),
    trained(
        "adapters merged that are not there",
        "merge_lora has no meaning without [model.lora]",
        training="merge_lora = true",
    ),
    trained(
        "records at a time in batches of many users",
        "microbatch_records has no meaning with path = 'fast'",
        training="microbatch_records = 2",
    ),
    trained(
        "records joined for one user at a time",
        "join_records has no meaning with path = 'plain'",
        training="join_records = true\npath = 'plain'",
    ),
    trained(
        "a phase after the last step",
        "the phase from step 4 on begins after all 4 steps",
        privacy="clip_norm =\nclipping = 'schedule'\nschedule = [[0, 1.0], [4, 0.5]]",
    ),
    trained(
        "a weight of public records that are not there",
        "public_weight has no meaning without [data] public",
        data="public_weight = 0.3",
    ),
    trained(
        "classes of running text", "without task = 'classification'", data="classes = ['a', 'b']"
    ),
    trained(
        "a constant rate that is held",
        "schedule_hold has no meaning",
        training="schedule = 'constant'\nschedule_hold = 0.5",
    ),
    trained("a warm-up of all steps", "warmup_steps=4 of 4", training="warmup_steps = 4"),
    trained(
        "no rate for an optimizer of another size",
        "[training] learning_rate is missing",
        training="optimizer = 'sgd'",
    ),
    trained(
        "an option of another optimizer",
        "no option 'bettas'",
        training="optimizer_options = { bettas = [0.9, 0.99] }",
    ),
    trained(
        "a least weight that is missing",
        "min_weight is missing: the estimator f_c",
        training="update = 'fedavg'\nlocal_learning_rate = 0.1\nestimator = 'f_c'",
    ),
    # Training
    trained("a learning rate of zero", "learning_rate", training="learning_rate = 0.0"),
    trained("a rate that no weight holds", "learning_rate", training="learning_rate = 1e300"),
    trained(
        "steps that are true", "training.steps = True: write a number", training="steps = true"
    ),
    trained("steps in quotes", "training.steps = '40': write a number", training="steps = '40'"),
    trained(
        "one beta",
        "betas = 0.9: give both",
        training="learning_rate = 0.01\noptimizer_options = {betas = 0.9}",
    ),
    command("a seed below zero", "--seed", "quickstart", "--seed", "-1", "--out", "q"),
    command("no record a user", "records-per-user", *PLAN[:4], "0", *PLAN[5:]),
    command("too many records a user", "records-per-user", *PLAN[:4], "99999999999", *PLAN[5:]),
    trained("an unknown optimizer", "optimizer", training="optimizer = 'guess'"),
    trained("an unknown device", "device 'abacus'", training="device = 'abacus'"),
    trained("rows of one token", "sequence_length", data="sequence_length = 1"),
    # Options
    command("epsilon out of reach", "below 0.0001, the smallest", *CALIBRATE, "--epsilon", "1e-9"),
    command("calibrate epsilon nan", "epsilon=nan", *CALIBRATE, "--epsilon", "nan"),
    command("a rate above one", "user_sampling_prob=1.5", *ACCOUNT, "--rate", "1.5"),
    command("delta above one", "delta=2", *ACCOUNT, "--delta", "2"),
    command("no noise to account for", "protects nobody", *ACCOUNT, "--noise-multiplier", "0"),
    command("an unknown option", "No such option", *ACCOUNT, "--epsilonn", "3"),
    command("a number in words", "--rate", *ACCOUNT, "--rate", "often"),
    command("an unknown command", "Did you mean 'train'?", "trane"),
    command("a missing argument", "Missing argument", "import", "--out", "store"),
    command("an unknown unit", "--unit", *ACCOUNT, "--unit", "planet"),
    command("a plan of no users", "users", *PLAN, "--users", "0"),
    command("a plan of nobody", "give a store, or --users", "plan", *PLAN[5:]),
    command(
        "a plan by norms that are none", "nowhere.json", *PLAN, "--gradient-norms", "nowhere.json"
    ),
    command("a plan of no steps", "steps=0", *PLAN, "--steps", "0"),
]
