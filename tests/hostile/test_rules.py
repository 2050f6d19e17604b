"""The rules of the leaderboard, from strangers' files to the page, each with the tests that cover it.

A rule without a test fails here, and so do a case of the corpus that no rule names and a test that is gone.
"""

import ast
from pathlib import Path

import pytest
from hostile import corpus

TESTS = Path(__file__).parent.parent

RULES: dict[str, dict[str, tuple[str, ...]]] = {
    # Rule -> cases of the corpus, and test files with their tests.
    "what no honest entry has is held for a maintainer's word": {
        "hostile/test_screens.py": (
            "test_no_entry_of_the_project_is_flagged",
            "test_copies_with_noise_and_permuted_seeds_are_caught",
            "test_another_temperature_is_caught",
            "test_means_of_two_entries_are_caught",
            "test_one_run_as_three_seeds_is_caught",
            "test_distances_below_the_floor_are_flagged",
            "test_fewer_errors_than_the_best_published",
            "test_scores_that_are_the_loss_are_flagged",
            "test_information_lies_between_nothing_and_the_entropy",
            "test_deviations_that_are_the_errors_are_flagged",
        ),
        "hostile/test_cheats.py": ("test_a_cheat_gets_its_answer", "test_a_request_gets_its_answer"),
        "test_board.py": (
            "test_a_flagged_entry_is_held_until_a_maintainer_clears_the_flag",
            "test_a_copy_that_comes_later_holds_nobody_back",
        ),
    },
    "nothing is executed or unpickled": {
        "corpus": ("pickle", "pickle for arrays", "code", "task that is code", "task of one's own"),
        "test_architecture.py": (
            "test_nothing_is_unpickled",
            "test_only_the_registry_imports_what_a_string_says",
        ),
        "hostile/test_hostile.py": ("test_own_class_is_a_label_that_nobody_imports",),
    },
    "names of files are on a list, archives on none": {
        "corpus": ("curves", "archive", "record too high", "directory too deep", "seed00", "seed of words"),
    },
    "files are regular by lstat, with one link": {
        "corpus": (
            *("link for a record", "link for a directory", "link for the submission"),
            *("link that leads nowhere", "second name", "pipe", "socket", "directory for a record"),
            "directory for the manifest",
        ),
        "hostile/test_hostile.py": (
            "test_exchanged_file_is_noticed",
            "test_pipe_in_the_place_of_a_file_is_not_waited_for",
            "test_unreadable_files_and_directories_are_told",
            "test_arrays_may_lie_in_the_store",
        ),
    },
    "names of directories are [A-Za-z0-9_+=,.-]{1,120}, not hidden, not alike but for case": {
        "corpus": (
            *("hidden directory", "hidden file", "space in a name", "writing from right to left"),
            *("line break in a name", "name of 121 characters", "name that is no text"),
            "names alike but for case",
        ),
    },
    "nothing outside the directory": {
        "corpus": ("listed outside", "identity that climbs", "name that climbs"),
        "hostile/test_hostile.py": (
            "test_exchanged_file_is_noticed",
            "test_path_that_no_file_has_is_no_submission",
        ),
    },
    "bytes and files are counted before anything is read": {
        "corpus": ("large record", "large arrays", "large manifest", "too much in all", "too many"),
    },
    "the length of a safetensors header is read here, at most 64 KB": {
        "corpus": (
            *("no header", "empty file", "header of 2^63 bytes", "header beyond the file"),
            "header over 64 KB",
        ),
    },
    "a header has the form of one, without keys that stand twice": {
        "corpus": (
            *("name twice", "header that is a list", "header of nothing", "header that is no JSON"),
            *("header of another encoding", "entry with more keys", "entry without offsets"),
            *("shape of fractions", "shape of truths", "shape of words", "three offsets"),
            *("type that is a list", "60,000 axes"),
        ),
        "hostile/test_fuzz.py": (
            "test_what_the_library_wrote_is_read",
            "test_damaged_arrays_are_read_as_the_library_reads_them_or_refused",
            "test_hostile_headers_are_read_as_the_library_reads_them_or_refused",
            "test_fuzzing_would_notice",
        ),
    },
    "names of arrays are plain": {
        "corpus": ("metadata", "name of an attribute", "deceiving name", "long name", "65 arrays"),
    },
    "arrays do not overflow, overlap or leave holes": {
        "corpus": (
            *("shape [0, 2^40]", "shape that overflows", "shape below nothing", "nine axes"),
            *("shape of other bytes", "offsets turned round", "offsets beyond the file", "overlap", "hole"),
            *("late beginning", "bytes after the end"),
        ),
    },
    "keys, types and shapes are those of the task": {
        "corpus": (
            *("bfloat16", "objects", "labels of eight bytes", "one array more", "one array less"),
            *("one example for all", "one axis more"),
        ),
    },
    "JSON is strict UTF-8": {
        "corpus": ("UTF-16", "byte order mark", "overlong UTF-8", "surrogate in UTF-8"),
    },
    "JSON has no key twice": {
        "corpus": ("key twice", "key twice, deep inside", "key twice in the manifest"),
    },
    "numbers are finite and of 64 bits, 1e999 too": {
        "corpus": (
            *("1e999", "-1e999", "NaN", "-Infinity", "integer of 31 digits", "integer of 5,000 digits"),
        ),
    },
    "depth and lengths of JSON are bounded": {
        "corpus": (
            *("17 lists", "500,000 lists", "objects in objects", "long string", "long key", "long list"),
        ),
    },
    "models are strict, without further keys, with the longest lengths": {
        "corpus": (
            *("half a record", "two documents", "nothing", "comment", "no object", "more keys"),
            *(
                "seed in quotes",
                "seed true",
                "negative seed",
                "metric in quotes",
                "schema true",
                "schema 1.0",
            ),
            *("no authors", "101 authors", "author of 201 characters", "markup for a licence"),
            *("slug in capitals", "negative hours", "digest that is none"),
        ),
        "hostile/test_fuzz.py": (
            "test_json_that_is_accepted_is_the_document",
            "test_any_bytes_are_read_or_refused",
            "test_damaged_json_is_read_or_refused",
        ),
    },
    "no control characters, no change of the direction of writing": {
        "corpus": (
            *("writing direction", "escape sequence", "lone surrogate", "NUL", "deceiving key"),
            *("deceiving author", "filler for an author", "blank braille for an author"),
            *("blanks for an author", "wide blanks", "flood of marks", "lone marks"),
        ),
    },
    "links are https": {
        "corpus": (
            *("script for a link", "link without TLS", "quote in a link", "user in a link"),
            "host in other letters",
        ),
    },
    "predictions are finite and normalised within 2e-3": {
        "corpus": (
            *("NaN everywhere", "one NaN", "minus infinity", "probability of 2"),
            *("probabilities of nothing", "sum of 1.003"),
        ),
    },
    "a metric that is not finite rejects; one that may be undefined is null with its reason": {
        "corpus": ("metric left out", "diverged with metrics"),
        "hostile/test_hostile.py": (
            "test_undefined_metric_is_null_where_the_spec_permits",
            "test_scores_that_are_not_finite_and_bugs_of_a_score_are_told",
        ),
    },
    "the name of a method is a label": {
        "hostile/test_hostile.py": ("test_own_class_is_a_label_that_nobody_imports",),
    },
    "metrics computed again are those that are claimed, and possible": {
        "corpus": (
            *("metric changed", "metric changed, unlisted", "prediction changed, with its digest"),
            *("accuracy above 1", "negative NLL", "metric of one's own", "main metric of one's own"),
        ),
        "hostile/test_hostile.py": (
            "test_metrics_are_the_same_within_the_rounding_of_a_sum",
            "test_word_of_the_method_is_self_reported",
        ),
    },
    "targets, data and all that is no prediction are the task's, or the answer says that nobody can know": {
        "corpus": (
            *("label changed", "label changed, with metrics", "labels shuffled", "labels as predicted"),
            "other data",
        ),
        "hostile/test_hostile.py": (
            "test_without_the_data_targets_are_held_to_the_list",
            "test_targets_that_nobody_can_know_are_told",
            "test_all_that_is_no_prediction_is_ours",
            "test_the_list_is_what_the_tasks_say",
        ),
        "test_board.py": ("test_invented_targets_leave_and_ours_stay",),
    },
    "facts are within bounds and agree; the command shown is made from the settings": {
        "corpus": (
            *("negative seconds", "seconds of ages", "2^62 members", "no threads", "negative epochs"),
            *("negative steps", "fit of negative seconds", "version of the future", "version that is none"),
            *("date that is none", "date without a zone", "day that is none", "date of the future"),
            *("date before the suite", "seeds that differ and do not matter", "tuned with nothing"),
        ),
        "hostile/test_hostile.py": ("test_the_command_shown_is_made_from_the_settings",),
    },
    "one entry moves no pair of others": {
        "test_ranking.py": (
            "test_no_other_entry_moves_what_two_entries_say_of_each_other",
            "test_one_entry_of_1e12_leaves_the_level_as_it_is",
        ),
    },
    "a request touches its own submission and nothing else": {
        "test_workflows.py": (
            "test_one_submission_of_ones_own_is_verified",
            "test_what_is_not_ones_own_is_refused",
        ),
    },
    "the server has its own names, files and few connections": {
        "test_site.py": (
            "test_serving_is_for_this_machine_alone",
            "test_links_out_of_the_site_are_not_followed_and_folders_not_listed",
            "test_slow_connections_are_few_and_end",
        ),
    },
    "arrays are there once: across seeds, methods and entries": {
        "corpus": ("duplicated seeds", "another method's predictions"),
        "hostile/test_hostile.py": (
            "test_predictions_of_an_entry_on_the_board_are_refused",
            "test_seeds_may_agree_where_they_do_not_matter",
        ),
    },
    "the manifest names every file with its digest, and says what the records say": {
        "corpus": (
            *("no manifest", "no record", "no record, listed", "empty task", "not listed", "hash changed"),
            *("seconds changed", "prediction changed", "prediction changed, listed", "another slug"),
            *("hours made up", "environment made up", "environment twice", "no arrays", "no arrays, listed"),
            "arrays without a digest",
        ),
    },
    "seeds are contiguous from 0, enough, and run alike": {
        "corpus": (
            *("seed number changed", "seed number changed, unlisted", "seed left out", "two seeds"),
            *("another task's directory", "another method's directory", "seeds run differently"),
            *("seeds of two sources", "seeds of two data sets", "seeds of two versions"),
        ),
        "hostile/test_hostile.py": ("test_diverged_seeds_are_handed_in_without_arrays",),
    },
    "runs are evidence: no failures, no smoke, source that a commit or a release holds": {
        "corpus": (
            *("failed", "smoke", "preset of one's own", "changed source", "changed source, not told"),
            *("source of nowhere", "commit that is none"),
        ),
        "hostile/test_hostile.py": ("test_installed_release_is_source",),
    },
    "versions of schema and task are known, the task is ranked and in its standard settings": {
        "corpus": (
            *("schema 2", "schema 2 of the manifest", "another version of the task", "task without ranks"),
            *("variant of a task", "setting that the task has not", "setting of another identity"),
            "setting against the name",
            "task of other settings for one method",
        ),
    },
    "empty input is a failure": {
        "corpus": ("no directory", "empty directory", "file for a directory"),
        "hostile/test_hostile.py": ("test_command_refuses_nothing_at_all",),
    },
    "adversarial entries are refused, or scored for what they are": {
        "hostile/test_hostile.py": (
            "test_constant_predictions_are_duplicated_seeds",
            "test_constant_predictions_stand_at_chance",
            "test_ties_gain_nothing",
            "test_one_hot_predictions_pay_for_their_certainty",
        ),
    },
    "children with limits, without network, writing nothing": {
        "hostile/test_hostile.py": (
            "test_confined_process_can_do_little",
            "test_structure_takes_little_time_and_memory",
            "test_child_that_takes_too_long_is_ended",
            "test_child_that_takes_too_much_memory_is_ended",
            "test_command_accepts_and_leaves_everything_as_it_was",
        ),
    },
    "one code each, exit code not 0, and never an OK at the end of a failure": {
        "hostile/test_hostile.py": (
            "test_one_change_each_leads_to_a_code_of_its_own",
            "test_only_an_answer_is_an_answer",
            "test_defect_of_the_checker_is_a_code_and_no_traceback",
            "test_every_code_is_reached",
            "test_command_refuses_by_structure",
            "test_command_refuses_by_scores_and_says_so_last",
        ),
    },
    "pages escape everything, literally, and miss nothing silently": {
        "test_site.py": (
            "test_nothing_of_a_stranger_becomes_markup",
            "test_negative_control_unescaped_templates_are_caught",
            "test_templates_escape_literally",
        ),
    },
    "pages have a policy of contents, and links outside are https and give nothing away": {
        "test_site.py": (
            "test_every_page_has_the_policy",
            "test_links_outside_are_https_and_give_nothing_away",
        ),
        "test_site_browser.py": ("test_the_policy_holds",),
    },
    "cells of CSV are no formulas": {
        "test_site.py": ("test_no_cell_is_a_formula", "test_csv_of_the_example_holds_no_formula"),
    },
    "names on pages are composed and hide nothing": {
        "test_board.py": ("test_names_are_composed", "test_hidden_characters_in_a_manifest_are_refused"),
    },
    "one bad submission never stops the board": {
        "test_board.py": ("test_a_broken_submission_is_a_line_and_the_others_stay",),
        "test_site.py": ("test_build_says_what_it_could_not_show",),
    },
    "pages need no network and no script, on a phone, for axe, by keyboard, in the dark and on paper": {
        "test_site_browser.py": (
            "test_pages_need_no_network_and_break_no_policy",
            "test_the_order_of_the_table_is_the_rankings_with_and_without_scripts",
            "test_filter_leaves_the_rows_that_hold_all_words",
            "test_no_page_scrolls_sideways_on_a_phone",
            "test_axe_finds_nothing",
            "test_the_keyboard_reaches_the_content_first_and_shows_where_it_is",
            "test_dark_is_dark_and_print_is_plain",
        ),
    },
    "every number links to its record, JSON and CSV lie beside every table, a rebuild has the same bytes": {
        "test_site.py": (
            "test_every_value_leads_to_its_seeds_and_these_to_their_records",
            "test_json_beside_a_table_is_what_compare_reads",
            "test_built_again_from_nothing_and_from_the_cache_the_bytes_are_the_same",
        ),
    },
    "statistics are computed once, in Python": {
        "test_board.py": ("test_order_intervals_ranks_and_groups_are_the_rankings",),
    },
    "cells are t intervals, none below three seeds": {
        "test_ranking.py": (
            "test_a_cell_is_the_mean_over_seeds_with_students_interval",
            "test_two_seeds_and_their_copies_are_two_seeds",
        ),
    },
    "within a task entries are paired on examples, and intervals hold what they promise": {
        "test_ranking.py": (
            "test_two_entries_with_losses_by_hand",
            "test_cells_and_ranks_hold_the_truth",
            "test_ranks_hold_where_losses_are_skewed",
            "test_five_standard_errors_are_seen",
            "test_noise_is_no_win",
        ),
    },
    "ranks are intervals with tie groups; across tasks anchors, which no rival moves, complete rows only": {
        "test_ranking.py": (
            "test_ties_are_never_parted_and_ranks_agree_with_groups",
            "test_no_rival_moves_a_score",
            "test_only_complete_rows_are_compared",
        ),
    },
    "None is last in both directions; diverged seeds count and are shown": {
        "test_ranking.py": (
            "test_none_is_last_in_both_directions",
            "test_a_diverged_seed_is_counted_and_never_ranked",
        ),
        "test_site_browser.py": ("test_what_is_missing_is_last_in_both_directions",),
        "test_board.py": ("test_a_diverged_seed_is_shown_and_never_ranked",),
    },
    "withdrawn and superseded entries stay visible": {
        "test_board.py": ("test_withdrawn_and_superseded_are_struck_out_and_stay",),
    },
    "a logger's run is one per seed, ends with its exit code, and goes on where it stopped": {
        "test_wandb_run.py": (
            "test_two_seeds_of_one_process_are_two_runs_of_a_group",
            "test_two_processes_are_one_run",
            "test_a_crash_has_its_exit_code",
            "test_a_stopped_run_goes_on_in_the_same_run",
        ),
    },
}


def declared_in(file):
    """Names of the tests of a file; none if it is not there."""
    path = TESTS / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def gaps(rules):
    """What rules name and is not there, and what of the corpus no rule names."""
    known = {"corpus": {*corpus.STRUCTURE, *corpus.SCORES}}
    missing = [f"no test: {rule}" for rule, covering in rules.items() if not any(covering.values())]
    for rule, covering in rules.items():
        for file, names in covering.items():
            if file not in known:
                known[file] = declared_in(file)
            missing += [f"{rule}: {file}: {name}" for name in names if name not in known[file]]
    named = {name for covering in rules.values() for name in covering.get("corpus", ())}
    return missing + [f"of no rule: {name}" for name in sorted(known["corpus"] - named)]


def test_every_rule_has_tests_and_every_case_a_rule():
    assert gaps(RULES) == []


@pytest.mark.parametrize(
    ("rules", "gap"),
    [
        (RULES | {"be kind": {}}, "no test: be kind"),
        (RULES | {"be kind": {"corpus": ("kindness",)}}, "be kind: corpus: kindness"),
        (RULES | {"be kind": {"test_kind.py": ("test_it",)}}, "be kind: test_kind.py: test_it"),
        ({k: v for k, v in RULES.items() if k != "JSON has no key twice"}, "of no rule: key twice"),
    ],
)
def test_gaps_are_seen(rules, gap):
    assert gap in gaps(rules)
