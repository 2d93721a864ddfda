// Keeps a page of `watch.py` up to date: the server sends a line for every change of the run's files, and the page then
// takes over the content of the newest report, at the reader's place and with the sections open that the reader opened.

const LOST = "not live: the server does not answer";
const changes = new EventSource("events");
let shownState = null;
let shownContent = document.querySelector("main").outerHTML;

changes.onopen = () => showStatus("live");
changes.onerror = () => showStatus(LOST);
changes.onmessage = async ({data: state}) => {
  if (state === shownState) return;
  shownState = state;
  try {
    const response = await fetch("./", {cache: "no-store"});
    const text = await response.text();
    if (state !== shownState) return;  // a newer one is on its way
    showPage(text);
    showStatus("live");
  } catch {
    shownState = null;
    showStatus(LOST);
  }
};

function showStatus(words) {
  document.getElementById("live").textContent = words;
}

function showPage(text) {
  const page = new DOMParser().parseFromString(text, "text/html");
  const newMain = page.querySelector("main");
  if (newMain.outerHTML === shownContent) return;
  shownContent = newMain.outerHTML;
  const oldMain = document.querySelector("main");
  const place = [scrollX, scrollY];
  keepOpen(oldMain, newMain);
  oldMain.replaceWith(newMain);
  document.title = page.title;
  scrollTo(...place);
}

function keepOpen(oldMain, newMain) {
  const sectionOf = (details) => details.closest("section").id;
  const wasOpen = new Map();
  for (const details of oldMain.querySelectorAll("details")) wasOpen.set(sectionOf(details), details.open);
  for (const details of newMain.querySelectorAll("details")) {
    details.open = wasOpen.get(sectionOf(details)) ?? details.open;
  }
}
