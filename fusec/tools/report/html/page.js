"use strict";
// What a click, Enter or an arrow key shows. Panels are markup of jinja2, which has escaped all text;
// texts of kernels go into the page by textContent.
(async () => {
  const panel = document.getElementById("panel");
  const make = (tag, text = "", attributes = {}) => {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };
  if (!("DecompressionStream" in window)) {
    panel.replaceChildren(make("p", "This browser is too old to show the details of a launch."));
    return;
  }
  const data = await unpack(document.getElementById("data").textContent);
  const boxes = [...document.querySelectorAll(".box")];
  const narrow = matchMedia("(max-width: 1391px)"); // where the panel lies over the page's foot
  let tab = "Overview";
  let chosen = false; // by the reader: the panel stays then
  const chosenBox = () => document.querySelector(".box[aria-pressed=true]");

  // Comments, strings, words and numbers of a language, each in a span of its own.
  const COMMENTS = { Triton: "#.*", "C++": "//.*", PTX: "//.*", SASS: "//.*|/\\*.*?\\*/" };
  const WORDS =
    "def|for|in|if|else|return|import|from|while|static|const|void|float|double|int|auto|extern|" +
    "inline|template|kernel|grid|inside|sum|max|min|exp|tl|gl";
  const LONGEST = 120000; // characters to colour: more would take a while
  const coloured = (text, label) => {
    const made = make("pre", "", { tabindex: "0" });
    if (text.length > LONGEST) {
      made.textContent = text;
      return made;
    }
    const comment = COMMENTS[label] || "(?!)";
    const tokens = new RegExp(
      `(${comment})|("(?:[^"\\\\\\n]|\\\\.)*")|\\b(${WORDS})\\b|\\b(\\d[\\w.]*)\\b`, "g");
    let from = 0;
    for (const found of text.matchAll(tokens)) {
      const kind = "cswn"[found.slice(1).findIndex((group) => group !== undefined)];
      made.append(text.slice(from, found.index), make("span", found[0], { class: `hl-${kind}` }));
      from = found.index + found[0].length;
    }
    made.append(text.slice(from));
    return made;
  };

  // -- the panel -----------------------------------------------------------------------------
  const show = (id) => {
    const { panel: markup, listings } = data.boxes[id];
    const names = ["Overview", ...listings.map(([label]) => label)];
    if (!names.includes(tab)) tab = "Overview";
    const listing = listings.find(([label]) => label === tab);
    panel.innerHTML = markup;
    const content = panel.querySelector("[role=tabpanel]");
    content.setAttribute("aria-label", tab);
    if (listing) content.replaceChildren(coloured(data.texts[listing[1]], tab));
    for (const link of content.querySelectorAll("[data-box]"))
      link.addEventListener("click", () => choose(link.dataset.box, true));
    const bar = make("div", "", { role: "tablist", class: "tabs" });
    for (const name of names) {
      const chosen = name === tab;
      const button = make("button", name, {
        type: "button", role: "tab", "aria-selected": chosen, tabindex: chosen ? "0" : "-1",
      });
      button.addEventListener("click", () => turn(id, name));
      bar.append(button);
    }
    bar.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      turn(id, names[(names.indexOf(tab) + step + names.length) % names.length]);
    });
    const close = make("button", "close ✕", { type: "button", class: "close" });
    close.addEventListener("click", leave);
    content.before(close, bar);
  };
  const turn = (id, name) => {
    tab = name;
    show(id);
    panel.querySelector("[aria-selected=true]").focus();
  };
  const leave = () => {
    const box = chosenBox();
    panel.replaceChildren();
    box?.setAttribute("aria-pressed", "false");
    box?.focus();
  };
  const select = (id, focus = false) => {
    const box = data.boxes[id];
    if (!box) return;
    for (const element of boxes) {
      element.setAttribute("aria-pressed", element.id === id);
      element.classList.remove("near");
    }
    for (const call of document.querySelectorAll(".call"))
      call.classList.toggle("same", box.calls.includes(call.id));
    for (const path of document.querySelectorAll(".edges path")) {
      const { from, to } = path.dataset;
      path.classList.toggle("out", from === id);
      path.classList.toggle("in", to === id);
      if (from === id || to === id)
        document.getElementById(from === id ? to : from).classList.add("near");
    }
    for (const link of document.querySelectorAll(".plot a"))
      link.classList.toggle("now", link.dataset.box === id);
    show(id);
    const element = document.getElementById(id);
    if (focus) {
      element.focus({ preventScroll: true });
      element.scrollIntoView({ block: "center", inline: "nearest" });
      history.replaceState(null, "", `#${id}`);
    }
  };

  const choose = (id, focus = false) => {
    chosen = true;
    select(id, focus);
  };

  // -- what leads there ----------------------------------------------------------------------
  for (const box of boxes) box.addEventListener("click", () => choose(box.id));
  for (const link of document.querySelectorAll("a[data-box]"))
    link.addEventListener("click", (event) => {
      event.preventDefault();
      choose(link.dataset.box, true);
    });
  document.addEventListener("keydown", (event) => {
    const at = boxes.indexOf(document.activeElement);
    if (event.key === "Escape") chosenBox()?.focus();
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (at < 0 || !step) return;
    event.preventDefault();
    const next = boxes[at + step];
    if (next) choose(next.id, true);
  });

  // -- search: boxes that do not match fade, Enter goes to the next one that does ---------------
  const field = document.getElementById("search");
  const texts = new Map(boxes.map((element) => {
    const made = make("template");
    made.innerHTML = data.boxes[element.id].panel;
    const words = [...made.content.querySelectorAll(".sought")].map((part) => part.textContent);
    return [element, words.join("\n").toLowerCase()];
  }));
  const matches = () => {
    const wanted = field.value.trim().toLowerCase();
    return boxes.filter((element) => texts.get(element).includes(wanted));
  };
  field.addEventListener("input", () => {
    const found = new Set(matches());
    for (const element of boxes) element.classList.toggle("missed", !found.has(element));
    const shown = field.value.trim() ? `${found.size} of ${boxes.length}` : "";
    document.getElementById("found").textContent = shown;
  });
  field.form.addEventListener("submit", (event) => {
    event.preventDefault();
    const found = matches();
    const at = found.findIndex((element) => element.getAttribute("aria-pressed") === "true");
    if (!found.length) return;
    choose(found[(at + 1) % found.length].id);
    chosenBox()?.scrollIntoView({ block: "center", inline: "nearest" });
  });

  // -- until the reader chooses, the panel shows the dearest launch of the graph on screen -------
  const follow = new IntersectionObserver((entries) => {
    const seen = entries.find((entry) => entry.isIntersecting);
    if (!chosen && !narrow.matches && seen) select(seen.target.dataset.dearest);
  }, { rootMargin: "-45% 0px -45% 0px" });
  const linked = location.hash.slice(1);
  if (data.boxes[linked]) choose(linked, true);
  else if (boxes.length && narrow.matches) panel.replaceChildren(); // it would cover the graphs
  else if (boxes.length) select(document.querySelector(".graph[data-dearest]").dataset.dearest);
  else panel.replaceChildren(make("p", "There is nothing to select."));
  for (const graph of document.querySelectorAll(".graph[data-dearest]")) follow.observe(graph);
  document.documentElement.dataset.ready = "yes";
})();
