"""The plan page in a real browser: it draws, sorts, highlights and reports no error."""

import pytest

from tpurec.sharding.planner import plan
from tpurec.sharding.report import write_report
from tpurec.sharding.tables import FeatureSpec, TableSpec

pytestmark = pytest.mark.browser
HOSTILE = "</script><script>document.title='owned'</script>"


def _tables():
    sizes = [(f"t{k}", 10_000 * 4**k) for k in range(5)] + [(HOSTILE, 70_000)]
    return [TableSpec(name, rows, 64, (FeatureSpec(f"f_{name}", 2.0),)) for name, rows in sizes]


def _open(browser, tmp_path, *slices, tables=None, prices=(), batch=8192):
    found = [plan(tables or _tables(), slice_, batch) for slice_ in slices]
    summaries = [answer.summary() for answer in found]
    for summary, price in zip(summaries, prices, strict=False):
        summary["cost_per_million_examples"] = price
    path = tmp_path / "plan.html"
    write_report(path, found, summaries)
    browser.get_log("browser")
    browser.get(path.as_uri())
    return (found if len(found) > 1 else found[0]), path


def _texts(browser, selector):
    return [node.text for node in browser.find_elements("css selector", selector)]


def _errors(browser):
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.parametrize(("slice_", "chips"), [("v6e-16", 16), ("tpu7x:2x2x2", 8), ("v5p-128", 64)])
def test_every_chip_is_drawn_once_and_nothing_fails(browser, tmp_path, slice_, chips):
    _open(browser, tmp_path, slice_)
    assert len(browser.find_elements("css selector", ".chip")) == chips
    assert _errors(browser) == []


def test_pointing_at_a_chip_tells_its_memory_and_time(browser, tmp_path):
    from selenium.webdriver import ActionChains

    _open(browser, tmp_path, "tpu7x:2x2x2")
    ActionChains(browser).move_to_element(browser.find_element("css selector", ".chip")).perform()
    note = browser.find_element("id", "note").text
    assert "rank 0" in note and "rank 1" in note and "% of HBM" in note


def test_memory_and_time_colour_the_chips_differently(browser, tmp_path):
    def colours():
        return [
            chip.value_of_css_property("background-color") for chip in browser.find_elements("css selector", ".chip")
        ]

    _open(browser, tmp_path, "v6e-16")
    memory = colours()
    browser.find_element("css selector", "[data-metric=seconds]").click()
    assert colours() != memory


def test_tables_sort_by_a_click_and_light_up_their_chips(browser, tmp_path):
    from selenium.webdriver import ActionChains

    found, _ = _open(browser, tmp_path, "v6e-16")

    def names():
        return [cell.text for cell in browser.find_elements("css selector", "#tables tbody tr td:first-child")]

    by_time = [p.name for p in sorted(found.tables, key=lambda p: -p.seconds)]
    assert names()[0] == by_time[0]
    browser.find_element("xpath", "//th/button[text()='rows']").click()
    assert names()[0] == "t4"
    browser.find_element("xpath", "//th/button[text()='rows']").click()
    assert names()[0] == "t0"
    row = browser.find_element("css selector", "#tables tbody tr")
    ActionChains(browser).move_to_element(row).perform()
    held = {found.topology.coordinates(rank) for rank in found.table("t0").ranks}
    assert len(browser.find_elements("css selector", ".chip.held")) == len(held)


def test_a_table_name_cannot_break_out_of_the_page(browser, tmp_path):
    _open(browser, tmp_path, "v6e-4")
    assert browser.title == "Sharding plan: v6e-4"
    assert HOSTILE in browser.find_element("id", "tables").text
    assert _errors(browser) == []


def test_the_page_needs_no_network(browser, tmp_path):
    _, path = _open(browser, tmp_path, "v6e-4")
    text = path.read_text()
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text and "src=" not in text


def test_a_problem_is_shown_with_its_ways_out(browser, tmp_path):
    huge = TableSpec("huge", 400_000_000, 128, (FeatureSpec("f"),))
    found, _ = _open(browser, tmp_path, "v6e-4", tables=[huge])
    assert not found.fits
    problem = browser.find_element("css selector", ".problem").text
    assert "huge" in problem and "are missing" in problem and browser.find_elements("css selector", ".problem li")
    assert not browser.find_element("id", "torus").is_displayed()
    assert _errors(browser) == []


@pytest.mark.parametrize("slices", [("v6e-64",), ("v6e-16", "v5p-128", "tpu7x:2x2x2", "v6e-4"), ("v5p:4x4x244",)])
def test_narrow_windows_do_not_scroll_sideways(browser, tmp_path, slices):
    _open(browser, tmp_path, *slices, batch=3904 if "v5p:4x4x244" in slices else 8192)
    try:
        for width in (800, 600):
            browser.set_window_size(width, 900)
            assert browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth") <= 0
    finally:
        browser.set_window_size(1280, 1600)


def test_several_slices_are_compared_and_each_has_its_section(browser, tmp_path):
    huge = TableSpec("huge", 120_000_000, 128, (FeatureSpec("f"),))
    (small, large, none), _ = _open(
        browser, tmp_path, "v6e-4", "v6e-16", "v5e-4", tables=[*_tables(), huge], prices=(0.02, 0.01)
    )
    assert small.fits and large.fits and not none.fits

    def slices():
        return [text.split()[0] for text in _texts(browser, "#slices tbody td:first-child")]

    assert slices() == ["v6e-4", "v6e-16", "v5e-4"]
    rows = _texts(browser, "#slices tbody tr")
    assert "fits" in rows[0] and "0.0200" in rows[0] and "does not fit" in rows[2]
    steps = [found.estimates.step_seconds for found in (small, large)]
    fastest = ("v6e-4", "v6e-16")[steps.index(min(steps))]
    best = browser.find_element("css selector", "#slices td.step_seconds.best").find_element("xpath", "..")
    assert best.text.startswith(fastest)
    browser.find_element("xpath", "//table[@id='slices']//button[text()='cost / 1M']").click()  # most first
    assert slices() == ["v6e-4", "v6e-16", "v5e-4"]
    browser.find_element("xpath", "//table[@id='slices']//button[text()='cost / 1M']").click()  # least, unknown last
    assert slices() == ["v6e-16", "v6e-4", "v5e-4"]

    assert len(browser.find_elements("css selector", ".chip")) == 4, "the first slice that fits is open"
    browser.find_element("css selector", "#slices tbody tr").click()  # v6e-16, by its row
    assert len(browser.find_elements("css selector", ".chip")) == 16
    assert _texts(browser, "[role=tab][aria-selected=true]") == ["v6e-16"]
    browser.find_element("xpath", "//button[@role='tab'][text()='v5e-4']").click()
    assert _texts(browser, ".problem") and not browser.find_element("id", "torus").is_displayed()
    browser.find_element("xpath", "//button[@role='tab'][text()='v6e-4']").click()
    assert not _texts(browser, ".problem") and len(_texts(browser, "#tables tbody tr")) == 7
    assert _errors(browser) == []


def test_a_table_is_found_by_a_part_of_its_name(browser, tmp_path):
    _open(browser, tmp_path, "v6e-4")
    browser.find_element("id", "find").send_keys("T3")
    assert _texts(browser, "#tables tbody td:first-child") == ["t3"]


def test_a_thousand_tables_are_a_page_that_ends_and_a_small_file(browser, tmp_path):
    spec = [TableSpec(f"t{k}", 1000 + k, 8, (FeatureSpec(f"f{k}"),), pin="data_parallel") for k in range(1000)]
    _, path = _open(browser, tmp_path, "v6e-4", "v5e-4", tables=spec)
    assert path.stat().st_size < 300_000
    assert len(browser.find_elements("css selector", "#tables tbody tr")) == 100
    browser.find_element("xpath", "//table[@id='tables']//button[text()='rows']").click()  # sorts all of them
    assert browser.find_element("css selector", "#tables tbody td").text == "t999"
    more = browser.find_element("id", "more")
    assert more.text == "show all 1,000 tables"
    more.click()
    assert len(browser.find_elements("css selector", "#tables tbody tr")) == 1000 and not more.is_displayed()
    assert _errors(browser) == []


def test_thousands_of_chips_are_cells_wide_enough_to_point_at_and_a_small_file(browser, tmp_path):
    found, path = _open(browser, tmp_path, "v5p-8960", batch=4480)
    assert path.stat().st_size < 200_000
    chips = browser.find_elements("css selector", ".chip")
    assert len(chips) == 4480
    torus = browser.find_element("id", "torus").rect
    assert min(chips[0].size.values()) >= 5 and torus["height"] < 900
    coordinates = found.topology.coordinates(4000)
    label = f"chip {', '.join(map(str, coordinates))}"
    browser.execute_script("document.querySelector(`[aria-label='${arguments[0]}']`).focus()", label)
    assert "rank 4000: " in browser.find_element("id", "note").text
    assert _errors(browser) == []


def test_dark_pages_have_light_text(browser, tmp_path):
    from selenium.webdriver.support.ui import WebDriverWait

    def sums(scheme):
        """Ink, paper and a chip, each as the sum of red, green and blue; the page repaints when it is told."""
        chip = browser.find_element("css selector", ".chip")
        before = chip.value_of_css_property("background-color")
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        WebDriverWait(browser, 20).until(lambda _: chip.value_of_css_property("background-color") != before)
        body = browser.find_element("tag name", "body")
        texts = [node.value_of_css_property(key) for node, key in ((body, "color"), (body, "background-color"))]
        texts.append(chip.value_of_css_property("background-color"))
        return [sum(map(int, text[text.index("(") + 1 : -1].split(",")[:3])) for text in texts]

    _open(browser, tmp_path, "v6e-16")
    try:
        ink, paper, dark_chip = sums("dark")
        assert ink > 500 and paper < 200
        ink, paper, light_chip = sums("light")
        assert ink < 200 and paper > 600 and light_chip > dark_chip + 200  # hardly filled: near the paper in both
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
