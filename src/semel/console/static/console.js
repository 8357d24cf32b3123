// What makes a page live: it is fetched again every few seconds, and the parts that may change are put in place of the
// old ones. Without this script every page can be read, and every form works.

const EVERY = 5000;
const LATE = 30000;
// The server itself gives up after 15 seconds.
const TOO_LONG = 20000;

const pulse = document.getElementById("pulse");
const login = document.getElementById("login");
let timer = 0;
let pause = EVERY;

// A link with the token after "#" never sends it in a URL: it is sent as a form, and taken out of the address.
if (login && location.hash.length > 1) {
  const token = decoded(location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
  login.elements.token.value = token;
  login.requestSubmit();
} else {
  forget();
  addEventListener("hashchange", forget);
  if (document.querySelector(".live")) {
    document.addEventListener("visibilitychange", wake);
    wake();
  }
}

// A person who is logged in already may follow the link with the token again: what is no place of the page goes.
function forget() {
  const place = decoded(location.hash.slice(1));
  if (place && !document.getElementById(place)) history.replaceState(null, "", location.pathname + location.search);
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function wake() {
  clearTimeout(timer);
  if (document.hidden) {
    show("paused");
    return;
  }
  show("live");
  timer = setTimeout(refresh, pause);
}

function show(what) {
  if (!pulse) return;
  pulse.hidden = false;
  pulse.textContent = what;
  pulse.className = "pulse " + what;
}

async function refresh() {
  if (isBusy()) {
    timer = setTimeout(refresh, EVERY);
    return;
  }
  try {
    const answer = await fetch(location.href, {
      credentials: "same-origin",
      redirect: "error",
      signal: AbortSignal.timeout(TOO_LONG),
    });
    if (!answer.ok) throw new Error(answer.status);
    swap(new DOMParser().parseFromString(await answer.text(), "text/html"));
    pause = EVERY;
    wake();
  } catch {
    // The server is away, or the login is over: what is on the page stays, and is said to be old.
    pause = Math.min(pause * 2, LATE);
    show("late");
    timer = setTimeout(refresh, pause);
  }
}

// A person who selects text or types in a part that would be replaced is not disturbed.
function isBusy() {
  const selection = getSelection();
  const inside = (node) => node && (node.nodeType === 1 ? node : node.parentElement)?.closest(".live");
  if (selection && !selection.isCollapsed && inside(selection.anchorNode)) return true;
  const active = document.activeElement;
  return Boolean(active && inside(active) && active.matches("input, textarea, select"));
}

function swap(page) {
  add(page);
  for (const part of document.querySelectorAll(".live[id]")) {
    const fresh = page.getElementById(part.id);
    if (!fresh) {
      part.replaceChildren();
      continue;
    }
    if (fresh.innerHTML === part.innerHTML) continue;
    const scrolled = [...part.querySelectorAll(".scroll, pre")].map((each) => [each.scrollLeft, each.scrollTop]);
    const focused = part.contains(document.activeElement) ? place(part, document.activeElement) : null;
    part.replaceChildren(...document.importNode(fresh, true).childNodes);
    [...part.querySelectorAll(".scroll, pre")].forEach((each, number) => {
      if (scrolled[number]) [each.scrollLeft, each.scrollTop] = scrolled[number];
    });
    if (focused) find(part, focused)?.focus({ preventScroll: true });
  }
}

// A part that was not there before comes after the one that it follows on the fresh page.
function add(page) {
  let before = null;
  for (const fresh of page.querySelectorAll(".live[id]")) {
    const part = document.getElementById(fresh.id) ?? document.importNode(fresh, true);
    if (!part.isConnected) {
      if (!before) continue;
      before.after(part);
    }
    before = part;
  }
}

// The same link, by its address; if that is gone, the one at the same place.
const kinds = "a, button, pre[tabindex]";

function place(part, element) {
  return { href: element.getAttribute("href"), number: [...part.querySelectorAll(kinds)].indexOf(element) };
}

function find(part, { href, number }) {
  const all = [...part.querySelectorAll(kinds)];
  return (href !== null && all.find((each) => each.getAttribute("href") === href)) || all[number];
}
