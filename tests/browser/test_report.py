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


def _open(browser, tmp_path, slice_, tables=None):
    found = plan(tables or _tables(), slice_, 8192)
    summary = found.summary()
    path = tmp_path / "plan.html"
    write_report(path, found, summary)
    browser.get_log("browser")
    browser.get(path.as_uri())
    return found, path


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
    found, _ = _open(browser, tmp_path, "v6e-4", [huge])
    assert not found.fits
    problem = browser.find_element("css selector", ".problem").text
    assert "huge" in problem and browser.find_elements("css selector", ".problem li")
    assert _errors(browser) == []


def test_narrow_windows_do_not_scroll_sideways(browser, tmp_path):
    _open(browser, tmp_path, "v6e-64")
    browser.set_window_size(600, 900)
    try:
        wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    finally:
        browser.set_window_size(1280, 1600)
    assert wide <= 0
