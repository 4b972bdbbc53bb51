/* Several runs, token under token: identical tokens line up, differences stand out. Monospaced, so that it wraps. */
(() => {
  "use strict";
  const R = window.Redline;
  R.views = R.views || {};
  if (R.compare) return;
  const { h, text, model } = R;
  const CHARS = 22;

  const width = (words) => [...text.label(words, CHARS)].reduce((sum, c) => sum + (c.codePointAt(0) > 0x2e7f ? 2 : 1), 0);

  const cell = (run, index, letter) => {
    if (index === null || index === undefined) return h("span.rl-cmp-cell.rl-cmp-gap", { title: `${letter}: nothing here` });
    const token = run.tokens[index];
    const discarded = (run.rejected && run.rejected[index]) || [];
    const words = text.label(token.text, CHARS);
    const mark = model.MARKS[token.source] ? token.source : "target";
    const before = discarded.length ? `; struck before it: ${discarded.map((d) => text.label(d.text, 12)).join(" ")}` : "";
    const element = h("span.rl-cmp-cell.rl-chip", {
      "data-mark": mark, "data-run": letter, title: `${letter}: ${words} — ${model.MARKS[mark].name}, token ${index}${token.step === undefined ? "" : `, step ${token.step}`}${before}`,
    });
    if (token.text) text.render(element, token.text, "chip", CHARS);
    else element.append("◌");
    if (discarded.length) element.classList.add("rl-cmp-struck");
    return element;
  };

  const draw = (root, value) => {
    let data = null;
    try {
      data = typeof value === "string" && value ? JSON.parse(value) : value;
    } catch (error) {
      console.error("Redline compare value", error);
    }
    R.clear(root);
    if (!data || !Array.isArray(data.runs) || data.runs.length === 0) {
      root.append(h("p.rl-blank", { text: "Choose two or more runs: their texts are laid out token under token." }));
      return;
    }
    const letters = data.runs.map((_, n) => String.fromCharCode(65 + (n % 26)));
    const columns = data.alignment || [];
    const different = (column) => {
      const ids = column.map((index, n) => (index === null || index === undefined ? null : data.runs[n].tokens[index].id));
      return ids.some((id) => id !== ids[0]);
    };
    const differing = columns.map(different);
    const count = differing.filter(Boolean).length;
    const first = differing.indexOf(true);
    const key = h("div.rl-cmp-key", {}, ...data.runs.map((run, n) => h("span", {}, h("b", { text: letters[n] }), ` ${text.plain(run.label || run.id)}`)));
    const summary = h("p.rl-hint", { text: count === 0 ? `All ${columns.length} tokens are the same in every run.` : `${count} of ${columns.length} places differ; the first is place ${first + 1}.` });
    const detail = h("p.rl-cmp-detail", { "aria-live": "polite", text: "Point at a token, or move with the arrow keys, to read it here." });
    const body = h("div.rl-cmp-body", { role: "listbox", tabindex: "0", "aria-label": "Aligned tokens" });
    const jump = h("button.rl-seg", {
      type: "button", text: "next difference", title: "Key: n", disabled: count === 0,
      onclick: () => point(next(), true),
    });
    const legend = h("div.rl-legend", {}, ...["accepted", "corrected", "bonus", "target"].map((mark) => R.marks.sample(mark)),
      h("span.rl-aside", {}, h("span.rl-cmp-struck"), "drafts were struck out before this token"));
    root.append(h("div.rl-head", {}, key, h("span.rl-grow"), jump), summary, body, detail, legend);

    const column = (entry, index) => {
      const element = h("span.rl-cmp-col", { role: "option", "data-place": index, tabindex: "-1" });
      if (differing[index]) element.classList.add("rl-cmp-diff");
      entry.forEach((at, n) => element.append(cell(data.runs[n], at, letters[n])));
      element.setAttribute("aria-label", [...element.children].map((c) => c.title).join("; "));
      return element;
    };
    const label = () => h("span.rl-cmp-col.rl-cmp-letters", { "aria-hidden": "true" }, ...letters.map((l) => h("span.rl-cmp-cell", { text: l })));

    /** Lines are broken here, not by the browser, so that each one can begin with the letters of its runs. */
    const layout = () => {
      const probe = h("span.rl-chip", { text: "0".repeat(20) });
      body.replaceChildren(probe);
      const ch = (probe.getBoundingClientRect().width - 14) / 20 || 7.3;
      const room = body.clientWidth - 36;
      const lines = [];
      let line = null;
      let used = Infinity;
      columns.forEach((entry, index) => {
        const need = 6 + Math.max(...entry.map((at, n) => {
          if (at === null || at === undefined) return 14;
          return 14 + ch * width(data.runs[n].tokens[at].text) + (data.runs[n].rejected?.[at] ? 13 : 0);
        }));
        if (used + need > room) {
          line = h("div.rl-cmp-line", {}, label());
          lines.push(line);
          used = 0;
        }
        line.append(column(entry, index));
        used += need;
      });
      body.replaceChildren(...lines);
    };

    let at = -1;
    const point = (index, focus) => {
      const old = body.querySelector(".rl-sel");
      if (old) old.classList.remove("rl-sel");
      const element = body.querySelector(`[data-place='${index}']`);
      if (!element) return;
      at = index;
      element.classList.add("rl-sel");
      if (focus) element.focus({ preventScroll: false });
      detail.replaceChildren(h("b", { text: `Place ${index + 1}. ` }), [...element.children].map((c) => c.title).join("  ·  "));
    };
    const next = () => {
      const found = differing.indexOf(true, at + 1);
      return found < 0 ? first : found;
    };
    body.addEventListener("pointerover", (event) => {
      const element = event.target.closest("[data-place]");
      if (element) point(Number(element.dataset.place), false);
    });
    body.addEventListener("focusin", (event) => {
      const element = event.target.closest("[data-place]");
      if (element && Number(element.dataset.place) !== at) point(Number(element.dataset.place), false);
    });
    body.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: columns.length - 1 };
      if (event.key === "n") moves.n = next();
      if (!(event.key in moves)) return;
      event.preventDefault();
      if (columns.length) point(Math.max(0, Math.min(columns.length - 1, moves[event.key])), true);
    });
    layout();
    let width0 = body.clientWidth;
    if (window.ResizeObserver) {
      new ResizeObserver(() => {
        if (Math.abs(body.clientWidth - width0) < 8) return;
        width0 = body.clientWidth;
        layout();
      }).observe(body);
    }
  };

  R.compare = { draw };
})();
