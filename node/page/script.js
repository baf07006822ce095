// Replaces the page's content after each change. Without scripts, the reader reloads the page.
"use strict";
const live = document.getElementById("live");
let busy = false, again = false;

async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const answer = await fetch(location.href);
    if (!answer.ok) throw new Error(answer.status);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = document.getElementById("main");
    const scrolled = [...main.querySelectorAll(".wide")].map((each) => each.scrollLeft);
    const focused = [...main.querySelectorAll("[tabindex], a")].indexOf(document.activeElement);
    main.replaceChildren(...fresh.getElementById("main").childNodes);
    main.querySelectorAll(".wide").forEach((each, at) => { each.scrollLeft = scrolled[at] || 0; });
    if (focused >= 0) main.querySelectorAll("[tabindex], a")[focused]?.focus({ preventScroll: true });
    live.textContent = "live, changed " + new Date().toLocaleTimeString();
  } catch {
    live.textContent = "no answer: shown as before";
  }
  busy = false;
  if (again) { again = false; refresh(); }
}

const events = new EventSource("/events");
events.onopen = () => { live.textContent = "live"; refresh(); };
events.onmessage = refresh;
events.onerror = () => { live.textContent = "not connected: shown as before"; };
