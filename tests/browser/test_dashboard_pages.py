"""The dashboard of a real run, as a person sees it in a browser."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe

pytestmark = pytest.mark.browser

PAGES = ("overview", "timeline", "staleness", "rollouts", "weights", "trajectories", "alerts", "config", "logs")


def chart_value(page, title):
    """Last value that a chart tells a screen reader."""
    return page.locator(f'.plot[aria-label^="{title}:"]').get_attribute("aria-label")


def wait_for_change(page, title, before):
    page.wait_for_function(
        "([title, before]) => document.querySelector(`.plot[aria-label^='${title}:']`)?.ariaLabel !== before",
        arg=[title, before],
    )


def test_reward_and_staleness_move_while_the_run_goes_on(page, live):
    page.goto(live.url)
    page.wait_for_selector('.plot[aria-label^="Reward: now"] canvas')
    page.wait_for_selector('.plot[aria-label^="Staleness: now"] canvas')
    reward, staleness = chart_value(page, "Reward"), chart_value(page, "Staleness")
    wait_for_change(page, "Reward", reward)
    wait_for_change(page, "Staleness", staleness)
    assert re.search(r"bound 2", chart_value(page, "Staleness"))
    assert page.locator("#bottleneck").inner_text() not in ("", "…")
    assert page.locator("#status").inner_text() == "running"


def test_legends_show_the_last_values_where_nothing_is_pointed_at(page, live):
    page.goto(live.url)
    page.wait_for_function(
        "() => { const shown = [...document.querySelectorAll('figure:has([aria-label^=Staleness]) .u-value')];"
        " return shown.length === 5 && shown.every((value) => /^[\\d.]+$/.test(value.textContent)); }"
    )
    page.goto(f"{live.url}/#/staleness")
    page.wait_for_function(
        "() => { const shown = [...document.querySelectorAll('figure:has([aria-label^=Trained]) .u-value')].slice(1);"
        " const sum = shown.reduce((sum, one) => sum + parseInt(one.textContent), 0);"
        " return shown.length === 3 && Math.abs(sum - 100) <= 2; }"  # shares, each rounded
    )


def test_a_trajectory_is_found_by_filters_and_coloured(page, live):
    page.goto(f"{live.url}/#/trajectories")
    page.wait_for_selector("tbody tr a")
    page.fill('input[name="min_reward"]', "99")
    page.press('input[name="min_reward"]', "Enter")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 0")
    page.fill('input[name="min_reward"]', "0")
    page.select_option('select[name="outcome"]', "trained")
    page.wait_for_selector("tbody tr a")
    steps = page.locator("tbody tr td:nth-child(6)").all_inner_texts()
    assert all(step.replace(",", "").isdigit() for step in steps)
    page.locator("tbody tr a").first.press("Enter")
    page.wait_for_selector("#tokens span.fill0")
    page.click('button[data-mode="logprob"]')
    assert page.locator("#tokens span[class^='sure']").count() > 0
    page.click('button[data-mode="mask"]')
    assert page.locator("#tokens span.masked").count() > 0


def test_the_theme_switches_and_stays(page, live):
    page.goto(live.url)
    page.wait_for_selector(".plot canvas")
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.click("#theme")
    dark = page.evaluate(background)
    assert light != dark
    page.reload()
    page.wait_for_selector(".plot canvas")
    assert page.evaluate(background) == dark


def test_every_page_is_reached_by_keyboard_and_fits_a_phone(page, live):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(live.url)
    for name in PAGES:
        page.locator(f'nav a[data-page="{name}"]').press("Enter")
        page.wait_for_selector(f'nav a[data-page="{name}"][aria-current="page"]')
        assert page.locator("h1").count() == 1
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390, name
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement !== document.body")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_issue_on_any_page(page, live, theme):
    page.emulate_media(color_scheme=theme)
    axe = Axe()
    for name in PAGES:
        page.goto(f"{live.url}/#/{name}")
        page.wait_for_selector("h1")
        if name == "trajectories":
            page.locator("tbody tr a").first.click()
            page.wait_for_selector("#tokens span")
        elif name == "overview":
            page.wait_for_selector(".plot canvas")
        found = axe.run(page).response["violations"]
        serious = [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")]
        assert serious == [], name


def test_control_without_the_token_changes_nothing_and_says_so(browser, live):
    page = browser.new_page()
    page.goto(live.url)
    page.click("#control")
    page.get_by_label("Run token").fill("guess")
    page.get_by_role("button", name="Pause rollouts").click()
    page.wait_for_function("() => document.querySelector('#control-panel p').textContent.includes('not the run')")
    page.get_by_label("Run token").fill(live.folder.read_state().token)
    page.get_by_role("button", name="Pause rollouts").click()
    page.wait_for_function("() => document.querySelector('#status').textContent === 'running, paused'")
    page.get_by_role("button", name="Unpause").click()
    page.wait_for_function("() => document.querySelector('#status').textContent === 'running'")
    page.close()


def test_a_killed_replica_turns_red_within_ten_seconds(page, live):
    page.goto(f"{live.url}/#/rollouts")
    page.wait_for_function("() => document.querySelectorAll('[aria-label=Replicas] tbody tr').length === 2")
    live.kill_role("rollout-1")
    row = page.locator("tr.dead", has_text="rollout-1")
    row.wait_for(timeout=10_000)
    assert "silent" in row.inner_text()
    bad = page.evaluate("() => getComputedStyle(document.querySelector('tr.dead td')).color")
    assert bad == "rgb(179, 38, 30)"
