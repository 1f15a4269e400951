"use strict";
// What a click, Enter or an arrow key shows. All text goes into the page by textContent.
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

  // -- parts of the panel --------------------------------------------------------------------
  const section = (title, ...content) => [make("h3", title), ...content];
  const table = (rows) => {
    const made = make("table");
    for (const [head, ...cells] of rows) {
      const row = made.insertRow();
      row.append(make("th", head, { scope: "row" }), ...cells.map((cell) => make("td", cell)));
    }
    return made;
  };
  const links = (ids) => {
    const made = make("p");
    for (const id of ids) {
      const box = data.boxes[id];
      const name = `${box.kind === "library" ? "eager" : box.names.split(",")[0]} ${box.title}`;
      const link = make("button", name, { type: "button", class: "go" });
      link.addEventListener("click", () => choose(id, true));
      made.append(link);
    }
    return made;
  };
  const list = (items) => {
    const made = make("ul");
    made.append(...items);
    return made;
  };
  const verdict = ([kind, rule, seen, advice]) => {
    const item = make("li");
    const sign = kind === "fault" ? "✕ fault" : "! warning";
    item.append(make("span", `${sign}, ${rule}: `, { class: kind }), `${seen}. ${advice}`);
    return item;
  };
  const decision = ([taken, a, b, saving, reason, against]) => {
    const item = make("li");
    const [yes, no, between] = against ? ["run", "not run", "in"] : ["merged", "apart", "with"];
    const sign = taken ? `✓ ${yes}` : `– ${no}`;
    item.append(make("span", `${sign} ${saving} `, { class: taken ? "yes" : "no" }));
    item.append(make("code", `${a} ${between} ${b}`), `${against && `, not ${against}`}: ${reason}`);
    return item;
  };
  const overview = (box) => {
    const parts = [table(box.facts)];
    if (box.reason) parts.push(...section("Why it is eager", make("p", box.reason)));
    if (box.findings.length) parts.push(...section("Verdict", list(box.findings.map(verdict))));
    else if (box.facts.some(([name]) => name.startsWith("registers")))
      parts.push(...section("Verdict", make("p", "✓ no fault in its machine code", { class: "yes" })));
    if (box.expected) parts.push(...section("Expected on the device", make("p", box.expected)));
    if (box.lines.length)
      parts.push(...section("Your lines", make("pre", box.lines.join("\n"), { class: "lines" })));
    parts.push(...section("Reads", table(box.reads)), ...section("Writes", table(box.writes)));
    if (box.fed.length) parts.push(...section("Fed by", links(box.fed)));
    if (box.feeds.length) parts.push(...section("Feeds", links(box.feeds)));
    if (box.decisions.length)
      parts.push(...section("Decisions of fusion", list(box.decisions.map(decision))));
    return parts;
  };

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
  const show = (box) => {
    const names = ["Overview", ...box.listings.map(([label]) => label)];
    if (!names.includes(tab)) tab = "Overview";
    const listing = box.listings.find(([label]) => label === tab);
    const content = make("div", "", { role: "tabpanel", "aria-label": tab });
    content.append(...(listing ? [coloured(data.texts[listing[1]], tab)] : overview(box)));
    const bar = make("div", "", { role: "tablist", class: "tabs" });
    for (const name of names) {
      const chosen = name === tab;
      const button = make("button", name, {
        type: "button", role: "tab", "aria-selected": chosen, tabindex: chosen ? "0" : "-1",
      });
      button.addEventListener("click", () => turn(box, name));
      bar.append(button);
    }
    bar.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      turn(box, names[(names.indexOf(tab) + step + names.length) % names.length]);
    });
    const where = box.where ? `${box.names} in ${box.where}` : box.names;
    const close = make("button", "close ✕", { type: "button", class: "close" });
    close.addEventListener("click", leave);
    panel.replaceChildren(make("h2", box.title), make("p", where, { class: "place" }), close, bar, content);
  };
  const turn = (box, name) => {
    tab = name;
    show(box);
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
      element.classList.toggle("near", box.feeds.includes(element.id) || box.fed.includes(element.id));
    }
    for (const call of document.querySelectorAll(".call"))
      call.classList.toggle("same", box.calls.includes(call.id));
    for (const path of document.querySelectorAll(".edges path")) {
      path.classList.toggle("out", path.dataset.from === id);
      path.classList.toggle("in", path.dataset.to === id);
    }
    for (const link of document.querySelectorAll(".plot a"))
      link.classList.toggle("now", link.dataset.box === id);
    show(box);
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
    const box = data.boxes[element.id];
    const words = [box.title, box.where, box.names, box.reason, ...box.lines];
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
