/* The answer as the editor left it: running text (or chips), growing while it is decoded. */
(() => {
  "use strict";
  const R = window.Redline;
  if (R.views && R.views.answer) return;
  R.views = R.views || {};
  const { h, marks, store } = R;

  const STORAGE = "redline.answer";
  const remembered = () => {
    try {
      return JSON.parse(localStorage.getItem(STORAGE)) || {};
    } catch {
      return {};
    }
  };

  R.views.answer = (root) => {
    const options = { mode: "text", rejected: true, untested: true, whitespace: false, ...remembered() };
    const elements = new Map();
    const heading = h("h2.rl-title", { text: "Answer" });
    const note = h("span.rl-aside", { text: "as the editor left it" });
    const switcher = h("div.rl-switch", { role: "group", "aria-label": "Show the answer as" });
    const tools = h("div.rl-tools", { role: "group", "aria-label": "What to show" });
    const flow = h("div.rl-flow", { role: "listbox", "aria-label": "Answer, token by token", "aria-orientation": "horizontal", dir: "auto" });
    const empty = h("p.rl-blank", { text: "The answer appears here, marked like a manuscript: what the draft wrote and the target kept, struck out or put right." });
    const problem = h("p.rl-problem", { role: "alert", hidden: true });
    const legend = h("div.rl-legend", { "aria-label": "What the marks mean" });
    const toggles = {};

    const setMode = (mode) => {
      options.mode = mode;
      settle();
      redraw();
    };
    for (const [mode, name, hint] of [["text", "Text", "Running text"], ["tokens", "Tokens", "Every token as a chip"]]) {
      switcher.append(h("button.rl-seg", { type: "button", "data-mode": mode, text: name, title: hint, onclick: () => setMode(mode) }));
    }
    const toggle = (name, wording, hint) => {
      toggles[name] = h("button.rl-toggle", { type: "button", title: hint, onclick: () => flip(name) }, wording);
      tools.append(toggles[name]);
    };
    const flip = (name) => {
      options[name] = !options[name];
      settle();
      if (name === "whitespace") redraw();
    };
    toggle("rejected", "rejected", "Show or hide drafts that were refused");
    toggle("untested", "never tested", "Show or hide drafts that were thrown away untested");
    toggle("whitespace", "spaces", "Show spaces, tabs and line breaks");
    for (const mark of ["accepted", "corrected", "rejected", "untested", "bonus", "target"]) legend.append(marks.sample(mark));

    root.append(
      h("div.rl-head", {}, heading, note, h("span.rl-grow"), tools, switcher), problem,
      h("div.rl-answer-body", {}, empty, flow), legend,
    );

    const settle = () => {
      for (const button of switcher.children) button.setAttribute("aria-pressed", String(button.dataset.mode === options.mode));
      for (const [name, button] of Object.entries(toggles)) button.setAttribute("aria-pressed", String(Boolean(options[name])));
      flow.dataset.mode = options.mode;
      flow.classList.toggle("rl-no-rejected", !options.rejected);
      flow.classList.toggle("rl-no-untested", !options.untested);
      try {
        localStorage.setItem(STORAGE, JSON.stringify(options));
      } catch {
        /* private windows remember nothing */
      }
    };

    const left = (token) => token.aside && options.mode === "text";
    const visible = (token) => !left(token) && !(token.mark === "rejected" && !options.rejected) && !(token.mark === "untested" && !options.untested);

    const make = (row, token) => {
      if (options.mode === "text") return marks.flow(row, token, options.whitespace);
      return marks.chip(row, token, "span", "option");
    };

    const append = (from) => {
      const fragment = document.createDocumentFragment();
      for (const row of store.state.rows.slice(from)) {
        const group = h("span.rl-step", { "data-step": row.index });
        if (row.index > store.state.position) group.classList.add("rl-future");
        for (const index of row.order) {
          const token = row.tokens[index];
          if (left(token)) continue;
          const element = make(row, token);
          elements.set(marks.key(token), element);
          group.append(element);
          if (options.mode === "tokens" && token.flow && token.flow.includes("\n")) group.append(h("br"));
          else if (options.mode === "tokens") group.append("\u200b");
        }
        fragment.append(group);
      }
      flow.append(fragment);
      empty.hidden = store.state.rows.length > 0;
      if (!flow.querySelector("[tabindex='0']") && flow.querySelector("[data-s]")) flow.querySelector("[data-s]").tabIndex = 0;
      follow();
    };

    const body = flow.parentElement;
    let atEnd = true;
    body.addEventListener("scroll", () => {
      atEnd = body.scrollTop + body.clientHeight >= body.scrollHeight - 40;
    }, { passive: true });
    let pending = 0;
    const follow = () => {
      if (!store.state.live || !store.state.follow || !atEnd || pending) return;
      pending = requestAnimationFrame(() => {
        pending = 0;
        body.scrollTop = body.scrollHeight;
      });
    };

    const redraw = () => {
      elements.clear();
      R.clear(flow);
      append(0);
      frame(null, store.state.selection, false);
    };

    const frame = (from, to, focus) => {
      for (const old of flow.querySelectorAll(".rl-sel, .rl-sel-whole")) {
        old.classList.remove("rl-sel", "rl-sel-whole");
        old.removeAttribute("aria-selected");
      }
      const element = to && elements.get(marks.key(to));
      if (!element) return;
      for (const old of flow.querySelectorAll("[tabindex='0']")) old.tabIndex = -1;
      element.tabIndex = 0;
      element.classList.add("rl-sel");
      element.setAttribute("aria-selected", "true");
      const { part } = store.token(to);
      if (part && options.mode === "text") elements.get(marks.key(part.group[part.of - 1]))?.classList.add("rl-sel-whole");
      if (focus && root.contains(document.activeElement)) element.focus({ preventScroll: true });
      if (!store.state.chosen) body.scrollTop = 0;
      reveal(element);
    };

    /** Scroll inside the card only: the page stays where it is. */
    const reveal = (element) => {
      if (body.scrollHeight <= body.clientHeight) return;
      const inner = body.getBoundingClientRect();
      const outer = element.getBoundingClientRect();
      if (outer.top < inner.top) body.scrollTop -= inner.top - outer.top + 24;
      else if (outer.bottom > inner.bottom) body.scrollTop += outer.bottom - inner.bottom + 24;
    };

    /** Rows whose visibility changes between two positions; nothing else is touched. */
    const veil = (from, to, still) => {
      const groups = flow.children;
      const [low, high] = from < to ? [from + 1, to] : [to + 1, from];
      for (let i = Math.max(0, low); i <= high && i < groups.length; i += 1) groups[i].classList.toggle("rl-future", i > to);
      const group = groups[to];
      if (group && !still) reveal(group);
    };

    /** Room for what is to come, so that nothing below moves while the answer grows. */
    const reserve = () => {
      const request = (store.state.run && store.state.run.request) || {};
      const tokens = store.state.live ? Number(request.max_new_tokens) || 128 : 0;
      const width = Math.max(280, body.clientWidth || 640);
      // Six or seven characters a token, of eight pixels, and as much again for what is struck out.
      const lines = Math.ceil((tokens * 2.2 * 6.5 * 8.4) / width) + 1;
      body.style.setProperty("--rl-answer-lines", store.state.live ? String(Math.max(5, lines)) : "4");
    };

    const status = () => {
      const { run, end, meta, rows, live } = store.state;
      if (!run) return;
      if (live) R.setText(note, rows.length ? "being written" : "reading the prompt");
      else R.setText(note, meta && meta.state === "interrupted" ? "interrupted: these are the steps it had" : "as the editor left it");
      const error = end && run.error;
      problem.hidden = !error;
      R.setText(problem, error ? `The run ended with an error: ${run.error}${/[.!?]$/.test(run.error) ? "" : "."} What was decoded before it is kept.` : "");
    };

    settle();
    marks.listen(root);
    marks.keys(root, { accept: () => visible });
    if (store.state.run) {
      append(0);
      status();
    }
    return (event, detail) => {
      if (event === "run") {
        elements.clear();
        R.clear(flow);
        body.scrollTop = 0;
        atEnd = true;
        empty.hidden = false;
        reserve();
        status();
        // Where everything is stacked, the answer to a Run would begin out of sight.
        if (store.state.live && window.innerWidth <= 700) {
          root.scrollIntoView({ behavior: R.reducedMotion() ? "auto" : "smooth", block: "start" });
        }
      } else if (event === "steps") {
        append(detail.from);
        status();
      } else if (event === "parts") {
        for (const index of detail.rows) {
          for (const token of store.state.rows[index].tokens) {
            const element = elements.get(marks.key(token));
            if (element && options.mode === "tokens") marks.fillChip(element, token);
          }
        }
      } else if (event === "position") veil(detail.from, detail.to, detail.still);
      else if (event === "selection") frame(detail.from, detail.to, detail.focus);
      else if (event === "hover") {
        for (const [at, on] of [[detail.from, false], [detail.to, true]]) {
          const element = at && elements.get(marks.key(at));
          if (element) element.classList.toggle("rl-hover", on);
        }
      } else if (event === "end") {
        status();
        for (const row of store.state.rows.slice(-20)) {
          for (const token of row.tokens) {
            const element = token.beyond ? elements.get(marks.key(token)) : null;
            if (element && options.mode === "text") marks.fillFlow(element, token, options.whitespace);
          }
        }
      }
    };
  };
})();
