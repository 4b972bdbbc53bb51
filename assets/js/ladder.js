/* The step ladder: a row per step. Only the rows in sight exist, so that thousands of steps scroll smoothly. */
(() => {
  "use strict";
  const R = window.Redline;
  R.views = R.views || {};
  if (R.views.ladder) return;
  const { h, marks, store, fmt } = R;

  const LINE = 34;
  const BRANCH = 28;
  /** Lines of one tree that are drawn. */
  const MAX_LINES = 24;
  const SPARE = 8;

  const timeBar = (row, scale) => {
    const { draft_ms: draft, verify_ms: verify, overhead_ms: overhead } = row.step;
    const bar = h("span.rl-time", { style: `width:${Math.max(2, Math.min(100, (100 * row.ms) / scale)).toFixed(1)}%` });
    for (const [name, ms] of [["draft", draft], ["verify", verify], ["overhead", overhead]]) {
      if (ms > 0) bar.append(h("i", { "data-part": name, style: `flex-grow:${ms.toFixed(3)}` }));
    }
    const words = row.index === 0
      ? "prefill: its time is counted apart"
      : `draft ${fmt.ms(draft)}, verify ${fmt.ms(verify)}, overhead ${fmt.ms(overhead)}`;
    return h("span.rl-row-time", { title: words, "aria-label": words }, h("span.rl-time-track", {}, bar),
      h("span.rl-num", { text: row.index === 0 ? "prefill" : fmt.ms(row.ms) }));
  };

  /** What stands behind the kept drafts of a step: the target's token, or why there is none. */
  const ending = (row, put) => {
    if (row.own) return [h("span.rl-arrow", { text: "→", "aria-hidden": "true" }), put(row.own)];
    return row.step.drafts.length ? [h("span.rl-nodraft", { text: "→ end of run" })] : [];
  };

  const chips = (row, element) => {
    const put = (token) => {
      const chip = marks.chip(row, token, "button");
      element.set(marks.key(token), chip);
      return chip;
    };
    if (!row.chain) return branches(row, put);
    const holder = h("span.rl-line", {}, ...row.lines[0].tokens.map((index) => put(row.tokens[index])));
    const { drafts, k_reason: why } = row.step;
    const nothing = row.index === 0 ? "from the prompt" : `nothing drafted${why ? `: ${R.text.plain(why, 48)}` : ""}`;
    if (!drafts.length) holder.append(h("span.rl-nodraft", { text: nothing, title: why }));
    holder.append(...ending(row, put));
    return h("span.rl-lines", {}, holder);
  };

  /** A tree: one column per place in the draft. The first line was kept; below each place, what else was drafted for it. */
  const branches = (row, put) => {
    const shown = row.lines.slice(0, MAX_LINES);
    const depth = Math.max(...shown.map((line) => line.from + line.tokens.length), row.lines[0].tokens.length + 1);
    const grid = h("span.rl-lines.rl-tree", { style: `grid-template-columns:repeat(${depth},max-content);grid-template-rows:${LINE - 1}px;grid-auto-rows:${BRANCH}px` });
    const cell = (column, line, kind, ...content) => {
      const spot = h(`span.rl-node${kind}`, { style: `grid-area:${line + 1}/${column + 1}` }, ...content);
      grid.append(spot);
      return spot;
    };
    shown.forEach((line, n) => {
      if (n > 0) {
        const from = row.lines[line.under].tokens[line.from - row.lines[line.under].from];
        const place = from === undefined ? row.own : row.tokens[from];
        grid.append(h("span.rl-elbow", {
          style: `grid-area:${line.under + 1}/${line.from + 1}/${n + 2}`, "aria-hidden": "true",
          title: place ? `also drafted in the place of ${R.text.label(place.label, 20)}` : "also drafted",
        }));
      }
      line.tokens.forEach((index, at) => {
        const more = n === 0 || at + 1 < line.tokens.length;
        cell(line.from + at, n, `${n === 0 ? ".rl-kept" : ""}${at === 0 ? ".rl-node-first" : ""}${more ? ".rl-node-more" : ""}`, put(row.tokens[index]));
      });
      if (n === 0) cell(line.tokens.length, n, `.rl-kept${line.tokens.length ? "" : ".rl-node-first"}`, ...ending(row, put));
    });
    if (row.lines.length > MAX_LINES) {
      const left = row.lines.slice(MAX_LINES);
      const tokens = left.reduce((sum, line) => sum + line.tokens.length, 0);
      grid.append(h("span.rl-nodraft", { style: `grid-area:${MAX_LINES + 1}/1/auto/-1`, text: `and ${fmt.count(left.length, "branch", "branches")} more (${fmt.count(tokens, "token")}), none kept` }));
    }
    return grid;
  };

  R.views.ladder = (root) => {
    const rowsBox = h("div.rl-rows", { role: "list", "aria-label": "Steps" });
    const scroller = h("div.rl-ladder-scroll", { tabindex: "0", role: "region", "aria-label": "Step ladder" }, rowsBox);
    const empty = h("p.rl-blank", { text: "One row per step: what was drafted, what became of it, what the target put in, and where the time went." });
    const hint = h("p.rl-hint.rl-tree-hint", { hidden: true, text: "Drafts are trees: the first line of a step was kept. Below it, in each place, stands what else was drafted there; of these only one can ever be kept." });
    root.append(empty, hint, scroller);

    const drawn = new Map();
    const elements = new Map();
    let offsets = [0];
    let scale = 1;
    let slowest = 0;
    let pending = 0;
    let stick = false;

    const height = (row) => LINE + (Math.min(row.lines.length, MAX_LINES + 1) - 1) * BRANCH + (row.chain ? 0 : 4);

    const measure = (from) => {
      offsets.length = from + 1;
      for (const row of store.state.rows.slice(from)) {
        offsets.push(offsets[row.index] + height(row));
        if (row.index > 0 && row.ms > slowest) slowest = row.ms;
      }
      if (hint.hidden) hint.hidden = store.state.rows.every((row) => row.chain);
      rowsBox.style.height = `${offsets[offsets.length - 1]}px`;
      // One scale for all bars; it grows in powers so that bars do not breathe with every step.
      const wanted = Math.max(1, slowest);
      if (wanted > scale || wanted < scale / 4) {
        scale = wanted * 1.15;
        forget();
      }
    };

    const forget = () => {
      drawn.clear();
      elements.clear();
      R.clear(rowsBox);
    };

    const find = (y) => {
      let low = 0;
      let high = Math.max(0, offsets.length - 2);
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (offsets[middle] <= y) low = middle;
        else high = middle - 1;
      }
      return low;
    };

    const make = (row) => {
      const own = new Map();
      const element = h("div.rl-row", {
        role: "listitem", "data-step": row.index, "aria-setsize": store.state.rows.length, "aria-posinset": row.index + 1,
        style: `top:${offsets[row.index]}px;height:${height(row)}px`,
      });
      const verdict = row.step.drafts.length ? `${row.accepted}/${row.step.drafts.length}` : "";
      const why = row.step.k_reason ? ` (k = ${row.step.k}: ${row.step.k_reason})` : "";
      element.append(
        h("button.rl-row-number", { type: "button", text: String(row.index), title: `Go to step ${row.index}`, tabindex: "-1", onclick: () => store.moveTo(row.index, { select: true }) }),
        chips(row, own),
        h("span.rl-row-count.rl-num", { text: verdict, title: verdict ? `${row.accepted} of ${row.step.drafts.length} draft tokens kept${why}` : null }),
        timeBar(row, scale),
      );
      drawn.set(row.index, { element, own });
      for (const [name, chip] of own) elements.set(name, chip);
      rowsBox.append(element);
      style(row.index);
    };

    const style = (index) => {
      const entry = drawn.get(index);
      if (!entry) return;
      const { position, selection } = store.state;
      entry.element.classList.toggle("rl-future", index > position);
      entry.element.classList.toggle("rl-now", index === position);
      entry.element.classList.toggle("rl-chosen", Boolean(selection && selection.step === index));
    };

    /** Draw what is in sight, drop what is not; keep the focused row, or focus would be lost. */
    const draw = () => {
      pending = 0;
      const rows = store.state.rows;
      if (stick) scroller.scrollTop = offsets[offsets.length - 1];
      stick = false;
      empty.hidden = rows.length > 0;
      scroller.classList.toggle("rl-quiet", rows.length === 0);
      if (!rows.length) return;
      const top = scroller.scrollTop;
      const first = Math.max(0, find(top) - SPARE);
      const final = Math.min(rows.length - 1, find(top + (scroller.clientHeight || 400)) + SPARE);
      const focused = rowsBox.contains(document.activeElement) ? Number(document.activeElement.closest(".rl-row").dataset.step) : -1;
      for (const [index, entry] of drawn) {
        if ((index < first || index > final) && index !== focused) {
          entry.element.remove();
          for (const name of entry.own.keys()) elements.delete(name);
          drawn.delete(index);
        }
      }
      for (let index = first; index <= final; index += 1) if (!drawn.has(index)) make(rows[index]);
      frame();
    };
    const soon = () => {
      if (!pending) pending = requestAnimationFrame(draw);
    };

    const reveal = (index) => {
      if (index < 0 || index >= offsets.length - 1) return;
      const top = offsets[index];
      const bottom = offsets[index + 1];
      const room = scroller.clientHeight;
      if (!room) return;
      if (top < scroller.scrollTop) scroller.scrollTop = Math.max(0, top - LINE);
      else if (bottom > scroller.scrollTop + room) scroller.scrollTop = bottom - room + (index < store.last() ? LINE : 0);
    };

    const frame = () => {
      const { selection } = store.state;
      for (const old of rowsBox.querySelectorAll(".rl-sel")) {
        old.classList.remove("rl-sel");
        old.setAttribute("aria-pressed", "false");
      }
      for (const old of rowsBox.querySelectorAll(".rl-chip[tabindex='0']")) old.tabIndex = -1;
      const chip = selection && elements.get(marks.key(selection));
      if (!chip) return null;
      chip.classList.add("rl-sel");
      chip.setAttribute("aria-pressed", "true");
      chip.tabIndex = 0;
      return chip;
    };

    const sideways = (chip) => {
      const inner = scroller.getBoundingClientRect();
      const outer = chip.getBoundingClientRect();
      if (outer.left < inner.left + 48) scroller.scrollLeft -= inner.left + 48 - outer.left;
      else if (outer.right > inner.right - 8) scroller.scrollLeft += Math.min(outer.right - inner.right + 16, outer.left - inner.left - 48);
    };

    scroller.addEventListener("scroll", soon, { passive: true });
    if (window.ResizeObserver) new ResizeObserver(soon).observe(scroller);
    marks.listen(root);
    marks.keys(root);

    const restart = () => {
      forget();
      offsets = [0];
      scale = 1;
      slowest = 0;
      hint.hidden = true;
      rowsBox.style.height = "0";
      scroller.scrollTop = 0;
    };
    if (store.state.rows.length) measure(0);
    draw();

    return (event, detail) => {
      if (event === "run") {
        restart();
        draw();
      } else if (event === "steps") {
        measure(detail.from);
        stick = store.state.live && store.state.follow;
        if (stick) soon();
        else draw();
      } else if (event === "position") {
        for (const index of drawn.keys()) style(index);
        if (!(store.state.live && store.state.follow) && !store.state.selection) reveal(detail.to);
        soon();
      } else if (event === "selection") {
        for (const at of [detail.from, detail.to]) if (at) style(at.step);
        if (!detail.to) {
          frame();
          return;
        }
        if (!(store.state.live && store.state.follow) || detail.focus) reveal(detail.to.step);
        const hadFocus = rowsBox.contains(document.activeElement);
        draw();
        const chip = frame();
        if (!chip) return;
        sideways(chip);
        if (detail.focus && hadFocus) chip.focus({ preventScroll: true });
      } else if (event === "hover") {
        for (const [at, on] of [[detail.from, false], [detail.to, true]]) {
          const chip = at && elements.get(marks.key(at));
          if (chip) chip.classList.toggle("rl-hover", on);
        }
      } else if (event === "parts") {
        for (const index of detail.rows) {
          for (const token of store.state.rows[index].tokens) {
            const chip = elements.get(marks.key(token));
            if (chip) marks.fillChip(chip, token);
          }
        }
      } else if (event === "end") {
        if (!store.state.chosen) scroller.scrollTop = 0;
        soon();
      }
    };
  };
})();
