"""The board's pages as files: what they hold, what strangers cannot put in, the same bytes every time."""

import contextlib
import csv
import http.client
import io
import json
import re
import shutil
import socket
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import boards
import pytest
from boards import HOSTILE, example, identity
from toys import call, environment

from bench import cli
from bench.errors import UsageError
from bench.leaderboard.rank import against, rows
from bench.leaderboard.rank.board import build
from bench.leaderboard.site import pages, serving, words
from bench.text import escaped

VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """The tags of a page, checked to be closed in the order in which they were opened."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.ids, self.text, self.open = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == [], path

    def handle_starttag(self, tag, attrs):
        """Opens a tag."""
        given = dict(attrs)
        assert len(given) == len(attrs)
        self.tags.append((tag, given))
        self.ids += [given["id"]] if "id" in given else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """Opens and closes one."""
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        """Closes the last that was opened."""
        assert self.open.pop() == tag

    def handle_data(self, data):
        """Keeps the text."""
        self.text.append(data)

    def links(self, tag="a", attribute="href"):
        """What tags of a name lead to."""
        return [given[attribute] for name, given in self.tags if name == tag and attribute in given]


@pytest.fixture(scope="module")
def site():
    """The folder of the example's pages."""
    return example().site


@pytest.fixture(scope="module")
def html(site):
    """Every page by its path."""
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


# ------------------------------------------------------------------------------------------- what there is


def test_pages_are_closed_titled_and_have_ids_once(html):
    assert len(html) > 15
    for path, page in html.items():
        assert len(page.ids) == len(set(page.ids)), path
        names = [name for name, _ in page.tags]
        assert (names.count("h1"), names.count("main")) == (1, 1)
        assert names[: names.index("body")].count("title") == 1  # others name the points of a drawing


def test_every_link_leads_somewhere(html, site):
    for path, page in html.items():
        targets = page.links() + page.links("link") + page.links("script", "src") + page.links("img", "src")
        for target in targets:
            if target.startswith(("https://", "data:")):
                continue
            file, _, anchor = unquote(target).partition("#")
            found = (path.parent / file).resolve() if file else path
            assert found.is_file(), (path, target)
            assert found.is_relative_to(site.resolve())
            if anchor:
                assert anchor in html[site / found.relative_to(site.resolve())].ids, (path, target)


def test_every_value_leads_to_its_seeds_and_these_to_their_records(html, site):
    board = example().board
    for task, table in board.tables.items():
        for row in table["entries"]:
            page = site / "methods" / row["slug"] / f"{row['folder']}.html"
            records = site / "runs" / task / row["slug"] / f"{row['folder']}.json"
            assert any(unquote(link).endswith(f"/{records.name}") for link in html[page].links())
            found = json.loads(records.read_text())
            known = [run["seed"] for run in row["runs"] if run["status"] != "unreadable"]
            assert [record["seed"] for record in found] == known


def test_the_tables_show_the_data(site):
    """Numbers on the page are those of the JSON beside it, in the same order."""
    table = example().board.tables[identity(0)]
    assert json.loads((site / "tasks" / f"{identity(0)}.json").read_text()) == table
    rows = list(csv.DictReader((site / "tasks" / f"{identity(0)}.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == [row["status"] for row in table["entries"]]
    assert [row["provisional"] for row in rows] == [str(row["provisional"]) for row in table["entries"]]
    for shown, row in zip(rows, table["entries"], strict=True):
        assert (float(shown["nll"]) if shown["nll"] else None) == row["mean"]
        assert (int(shown["first rank"]) if shown["first rank"] else None) == (row["ranks"] or [None])[0]
    text = (site / "tasks" / f"{identity(0)}.html").read_text()
    body = text[text.index("<tbody>") : text.index("</tbody>")]
    ranked = [row for row in table["entries"] if row["ranks"]]
    assert body.count(", provisional") == sum(row["provisional"] for row in ranked) > 0
    shown = re.findall(r'<th scope="row"><a href="[^"]+">([^<]+)</a>', body)
    assert shown == [row["name"] for row in ranked]
    values = re.findall(r'<td class="n" data-value="([^"]+)"><a', body)
    assert [float(value) for value in values] == [row["mean"] for row in ranked]


def test_the_first_page_says_what_is_known_best(site):
    """By the interval that lies farthest from nothing."""
    board = example().board
    widest = max((t["widest"] for t in board.tables.values() if t["widest"]), key=lambda w: w["clearness"])
    text = " ".join("".join(Page(site / "index.html").text).split())
    better, worse = widest["first"], widest["second"]
    assert widest["centre"] < 0  # of losses
    assert f", {better} is better than {worse} by " in text
    assert "How to submit" in text


def test_the_page_across_tasks_sets_quality_against_cost(site):
    """Of each task with enough entries a drawing whose points are its ranked entries, and a table of all."""
    page = Page(site / "overall.html")
    drawings = [given for tag, given in page.tags if tag == "svg"]
    board = example().board
    ranked = {task: [row for row in t["entries"] if row["ranks"]] for task, t in board.tables.items()}
    assert [given["role"] for given in drawings] == ["img"] * sum(len(rows) >= 3 for rows in ranked.values())
    assert sum(tag == "circle" for tag, _ in page.tags) == sum(map(len, ranked.values()))
    assert "a simulated processor, 1 thread" in "".join(page.text)
    found = json.loads((site / "fronts.json").read_text())
    assert [row["times the cheapest"] for row in found] == sorted(row["times the cheapest"] for row in found)
    assert {row["entry"] for row in found} == {row["name"] for rows in ranked.values() for row in rows}
    for row in found:
        for task in row["on the front of"]:
            own = next(of for of in ranked[task] if of["name"] == row["entry"])
            assert not [
                o for o in ranked[task] if o["mean"] < own["mean"] and row[task] > o["cost"]["seconds"]
            ]
    cells = list(csv.DictReader((site / "fronts.csv").read_text().splitlines()))
    assert [row["entry"].lstrip("'") for row in cells] == [row["entry"] for row in found]


def test_energy_has_a_column_where_some_run_has_it(site, tmp_path):
    page = f"tasks/{identity(0)}"
    assert "Energy" not in (site / f"{page}.html").read_text()
    assert "joules" not in (site / f"{page}.csv").read_text().splitlines()[0]
    maker = boards.Maker(tmp_path / "submissions")
    for method in range(3):
        for seed in range(3):
            energy = {"joules": 100.0 + seed, "source": "RAPL, 1 package"} if method == 2 else None
            given = {"energy": energy} if energy else {}
            maker.run("reference", 0, f"method{method:03}", seed, 0.4 + method, given, method_number=method)
    maker.seal("reference")
    found = build(tmp_path / "submissions", tmp_path / "cache", imports=boards.task_names(1))
    pages.write(found, tmp_path / "site")
    assert ">101 J</abbr>" in (tmp_path / "site" / f"{page}.html").read_text()
    Page(tmp_path / "site" / f"{page}.html")
    rows = list(csv.DictReader((tmp_path / "site" / f"{page}.csv").read_text().splitlines()))
    assert [(row["joules"], row["counted by"]) for row in rows if row["joules"]] == [
        ("101.0", "RAPL, 1 package")
    ]
    assert len(rows) == 3


def test_what_is_not_ranked_is_shown_with_its_reason(site):
    text = "".join(Page(site / "tasks" / f"{identity(0)}.html").text)
    for said in (
        "1 of 3 runs gave no value",
        "withdrawn: its authors <b>ask</b> for it",
        "superseded: by theirs",
        "the record of seed 2 cannot be read",
        "seeds: 1; the task asks for 3",
    ):
        assert said in text
    assert "broken/submission.json is no submission of schema 1" in "".join(Page(site / "index.html").text)
    struck = re.findall(r"<s><a[^>]*>([^<]+)</a></s>", (site / "tasks" / f"{identity(0)}.html").read_text())
    assert {"better-than-all (gone)", "method+rate=0.2 (older)"} <= set(struck)


def test_a_method_of_which_no_statement_is_true_is_marked_beside_its_name():
    """Others are not, nor is a stranger's, of whose file nothing is known here."""
    said = {
        name: rows.declared(name) for name in ("mc_dropout", "deep_ensemble", "nf_gamma_1_2_3_True", "own:C")
    }
    assert said == {
        "mc_dropout": "none",
        "deep_ensemble": "mode exact",
        "nf_gamma_1_2_3_True": "none",
        "own:C": "",
    }
    template = pages._environment().from_string('{% import "parts.html.j2" as p %}{{ p.declared(said) }}')
    assert "declares none" in template.render(said="none")
    assert template.render(said="mode exact") == template.render(said="") == ""


# ------------------------------------------------------------------------------- what strangers cannot do


def test_nothing_of_a_stranger_becomes_markup(html):
    """Scripts are ours alone, nothing runs on an event, no style and no script stands inside a page."""
    seen = 0
    for path, page in html.items():
        seen += HOSTILE in "".join(page.text)
        scripts = [given for tag, given in page.tags if tag == "script"]
        assert len(scripts) == 1
        assert scripts[0].keys() == {"src", "defer"}
        assert scripts[0]["src"].endswith("table.js")
        for tag, given in page.tags:
            assert tag not in ("b", "style", "iframe", "object", "embed", "form", "base"), path
            assert not [name for name in given if name.startswith("on") or name == "style"]
            assert tag != "img" or given["src"].startswith("../figures/")
    assert seen >= 3  # author, reason, command


def test_negative_control_unescaped_templates_are_caught(tmp_path, monkeypatch):
    """`select_autoescape` does not match .html.j2: the pages of a board that trusted it are injectable."""
    made = pages._environment

    def trusting():
        environment = made()
        environment.autoescape = False
        return environment

    monkeypatch.setattr(pages, "_environment", trusting)
    pages.write(example().board, tmp_path / "site")
    text = "".join(path.read_text() for path in (tmp_path / "site").rglob("*.html"))
    assert "<script>alert(1)" in text


def test_templates_escape_literally():
    environment = pages._environment()
    assert environment.autoescape is True
    assert environment.undefined.__name__ == "StrictUndefined"
    for name in environment.list_templates():
        source = environment.loader.get_source(environment, name)[0]
        assert "|safe" not in source.replace(" ", "")
        assert not re.findall(r"=\{\{", source), "an attribute without quotes"


def test_every_page_has_the_policy(html):
    for page in html.values():
        (policy,) = [g["content"] for t, g in page.tags if t == "meta" and "http-equiv" in g]
        assert policy == "default-src 'none'; style-src 'self'; img-src 'self' data:; script-src 'self'"


def test_links_outside_are_https_and_give_nothing_away(html):
    outside = [
        given for page in html.values() for tag, given in page.tags if tag == "a" and ":" in given["href"]
    ]
    assert len(outside) >= 4
    for given in outside:
        assert given["href"].startswith("https://")
        assert given["rel"] == "noopener nofollow ugc"
    assert "https://example.org/?a=1&b=2" in {given["href"] for given in outside}


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@sum", "\tx", "\rx"])
def test_no_cell_is_a_formula(text):
    ((header,), (cell,)) = csv.reader(io.StringIO(words.table([text], [[text]]), newline=""))
    assert header == cell == "'" + escaped(text)
    assert words.table(["x"], [[-1.5], [None], ["a"]]).splitlines() == ["x", "-1.5", '""', "a"]


def test_csv_of_the_example_holds_no_formula(site):
    cells = [
        cell
        for path in site.rglob("*.csv")
        for row in csv.reader(path.read_text().splitlines())
        for cell in row
        if cell[:1] in ("=", "+", "-", "@")
    ]
    assert all(re.fullmatch(r"-?[0-9.e+-]+", cell) for cell in cells)
    assert "'=cmd (hostile)" in (site / "tasks" / f"{identity(0)}.csv").read_text()


def test_nothing_is_written_outside_and_nothing_of_others_is_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="holds something else than a board"):
        pages.write(example().board, tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "letter.txt"]


# --------------------------------------------------------------------------------- the same bytes every time


def contents(folder):
    """Bytes of every file by its path."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_built_again_from_nothing_and_from_the_cache_the_bytes_are_the_same(site, tmp_path):
    made = example()
    for name, cache in (("anew", tmp_path / "cache"), ("again", made.cache)):
        pages.write(made.build(cache=cache), tmp_path / name)
        assert contents(tmp_path / name) == contents(site)
    # Over an older board, whose pages do not stay.
    (tmp_path / "anew" / "old.html").write_text("old")
    pages.write(made.board, tmp_path / "anew")
    assert contents(tmp_path / "anew") == contents(site)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "anew", "cache"]


def test_feed_is_atom(site):
    atom = "{http://www.w3.org/2005/Atom}"
    feed = ElementTree.parse(site / "feed.xml").getroot()
    assert feed.tag == f"{atom}feed"
    for element in (feed, *feed.findall(f"{atom}entry")):
        for name in ("id", "title", "updated"):
            assert element.findtext(atom + name)
    entries = feed.findall(f"{atom}entry")
    assert len(entries) == 5
    assert len({entry.findtext(f"{atom}id") for entry in entries}) == 5
    assert {name.text for name in feed.iter(f"{atom}name")} >= {HOSTILE}
    updated = [entry.findtext(f"{atom}updated") for entry in entries]
    assert updated == sorted(updated, reverse=True)
    assert feed.findtext(f"{atom}updated") == updated[0]


def test_json_beside_a_table_is_what_compare_reads(site):
    table = example().board.tables[identity(0)]
    read = against.read_board(site / "tasks" / f"{identity(0)}.json")
    assert (read.task, read.metric, read.higher_is_better) == (identity(0), "nll", False)
    assert [entry.name for entry in read.entries] == [row["name"] for row in table["entries"]]
    for entry, row in zip(read.entries, table["entries"], strict=True):
        assert [run.value for run in entry.runs] == [run["value"] for run in row["runs"]]


def test_json_is_strict(site):
    def refuse(constant):
        raise AssertionError(constant)

    for path in site.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)


# ------------------------------------------------------------------------------------------------- commands


def built(tmp_path, submissions, *more):
    """`bench board build` in this process."""
    imports = [part for name in boards.task_names(2) for part in ("--import", name)]
    where = ["--out", str(tmp_path / "site"), "--cache", str(tmp_path / "cache")]
    return cli.main(["board", "build", "--submissions", str(submissions), *where, *imports, *more])


def test_build_says_what_it_could_not_show(tmp_path, capsys):
    assert built(tmp_path, example().submissions) == 1
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'site' / 'index.html'}\n"
    assert "broken/submission.json is no submission of schema 1" in err
    assert "=cmd (hostile) on boards.Simulated00: the record of seed 2 cannot be read" in err
    assert "Traceback" not in err


def test_build_of_what_is_sound_ends_well_and_any_two_are_compared(tmp_path, capsys):
    maker = boards.Maker(tmp_path / "submissions")
    for method in range(3):
        for seed in range(3):
            maker.run("reference", 0, f"method{method:03}", seed, method_number=method)
    maker.seal("reference")
    assert built(tmp_path, maker.folder) == 0
    before = contents(tmp_path / "site")
    imports = [part for name in boards.task_names(1) for part in ("--import", name)]
    where = ["--out", str(tmp_path / "site"), "--cache", str(tmp_path / "cache"), *imports]
    compare = ["board", "compare", "--submissions", str(maker.folder), *where, identity(0)]
    names = [row["name"] for row in json.loads(before[Path("tasks", f"{identity(0)}.json")])["entries"]]
    assert cli.main([*compare, names[2], names[0]]) == 0
    page = Path(capsys.readouterr().out.splitlines()[-1])
    assert f"<h1>{names[0]} and {names[2]}</h1>" in page.read_text()
    assert cli.main([*compare, names[2], "nobody"]) == 2
    assert "no entry 'nobody' is ranked" in capsys.readouterr().err


def test_unknown_actions_and_missing_folders_are_one_line(tmp_path, capsys):
    assert cli.main(["board", "biuld"]) == 2
    assert "did you mean build" in capsys.readouterr().err
    assert cli.main(["board", "serve", "--out", str(tmp_path)]) == 2
    assert "holds no board" in capsys.readouterr().err
    assert cli.main(["board", "build", "--submissions", str(tmp_path / "none"), "--out", "x"]) == 2
    assert "is no folder of submissions" in capsys.readouterr().err
    assert cli.main(["board", "--help"]) == 0


@contextlib.contextmanager
def served(folder, **options):
    """The port of a server of pages."""
    with serving.server(folder, 0, **options) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def asked(port, path="/index.html", **headers):
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def test_serving_is_for_this_machine_alone(site):
    with served(site) as port:
        status, headers, body = asked(port)
        assert (status, body) == (200, (site / "index.html").read_bytes())
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert asked(port, "/../../etc/passwd")[0] == 404
        assert asked(port, Host=f"localhost:{port}")[0] == 200
        for other in ("evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""):
            assert asked(port, Host=other)[0] == 421


def test_links_out_of_the_site_are_not_followed_and_folders_not_listed(site, tmp_path):
    """Neither a link to a file, nor to a folder, nor an index that is one."""
    copy = Path(shutil.copytree(site, tmp_path / "site"))
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/page.html").write_text("secret")
    (copy / "link.html").symlink_to(tmp_path / "secret")
    (copy / "out").symlink_to(tmp_path / "folder")
    (copy / "inside").mkdir()
    (copy / "inside/page.html").write_text("a page")
    (copy / "indexed").mkdir()
    (copy / "indexed/index.html").symlink_to(tmp_path / "secret")
    with served(copy) as port:
        for path in (
            "/link.html",
            "/out/page.html",
            "/out/",
            "/indexed/",
            "/inside/",
            "/inside/../link.html",
        ):
            status, _, body = asked(port, path)
            assert (status, b"secret" in body, b"page.html" in body) == (404, False, False), path
        assert asked(port, "/inside/page.html")[2] == b"a page"
        assert asked(port, "/")[2] == (site / "index.html").read_bytes()


def test_slow_connections_are_few_and_end(site):
    """Of twelve that send a byte at a time four are held, and none beyond its deadline."""
    with served(site, most=4, seconds=1.0) as port:
        before = threading.active_count()
        slow = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(12)]
        began, ended = time.monotonic(), []
        while len(ended) < 12 and time.monotonic() < began + 8:
            for one in [one for one in slow if one not in ended]:
                try:
                    one.send(b"G")
                    one.setblocking(False)
                    if one.recv(100) == b"":
                        ended.append(one)
                except BlockingIOError:
                    pass
                except OSError:
                    ended.append(one)
            assert threading.active_count() <= before + 2 * 4
            time.sleep(0.1)
        assert len(ended) == 12
        assert asked(port)[0] == 200
        for one in slow:
            one.close()


@pytest.mark.slow
def test_a_second_build_needs_no_torch(tmp_path):
    """What was computed is kept; a process that finds all of it imports nothing that computes."""
    maker = boards.Maker(tmp_path / "submissions")
    for seed in range(3):
        maker.run("reference", 0, "method000", seed)
    maker.seal("reference")
    arguments = ["board", "build", "--submissions", "submissions", "--cache", "cache", "--out", "site"]
    arguments += ["--import", boards.task_name(0)]
    assert call(arguments, tmp_path).returncode == 0
    again = call(arguments, tmp_path, env=environment(PYTHONPROFILEIMPORTTIME="1"))
    assert again.returncode == 0
    assert "bench.leaderboard.rank.board" in again.stderr
    assert not re.findall(r"\| +(torch|pytorch_lightning|altair)$", again.stderr, re.MULTILINE)
