/* Three small charts of one run, drawn from the same steps as everything else: acceptance by position, accepted per
   step, time per step. Each says in words what it shows, and the numbers behind it can be read as a table. */
(() => {
  "use strict";
  const R = window.Redline;
  R.views = R.views || {};
  if (R.views.charts) return;
  const { h, fmt, store } = R;
  const MOST_COLUMNS = 90;

  /** Counts over the drafting steps so far, as decoder.metrics.acceptance makes them. */
  const count = () => {
    const positions = [];
    const histogram = [];
    let spec = 0;
    for (const row of store.state.rows) {
      const drafts = row.step.drafts;
      if (!drafts.length) continue;
      spec += 1;
      const depths = [];
      drafts.forEach((draft, index) => {
        const depth = draft.parent === null || draft.parent === undefined ? 0 : depths[draft.parent] + 1;
        depths[index] = depth;
        while (positions.length <= depth) positions.push(0);
        if (draft.verdict === "accepted") positions[depth] += 1;
      });
      while (histogram.length <= Math.max(row.accepted, ...depths.map((d) => d + 1))) histogram.push(0);
      histogram[row.accepted] += 1;
    }
    return { spec, positions: positions.map((n) => n / spec), histogram };
  };

  const table = (head, rows) => h("table.rl-table", {},
    h("thead", {}, h("tr", {}, ...head.map((cell) => h("th", { scope: "col", text: cell })))),
    h("tbody", {}, ...rows.map((cells) => h("tr", {}, ...cells.map((cell) => h("td.rl-num", { text: cell }))))));

  const columns = (entries, most) => {
    const plot = h("div.rl-plot-columns", { "aria-hidden": "true" });
    for (const { name, value, words, said } of entries) {
      plot.append(h("div.rl-plot-column", { title: said },
        h("span.rl-plot-space", {}, h("span.rl-plot-value.rl-num", { text: words }), h("i", { style: `height:${most > 0 ? ((100 * value) / most).toFixed(1) : 0}%` })),
        h("span.rl-plot-name.rl-num", { text: name })));
    }
    return plot;
  };

  const timeStrip = (rows) => {
    const steps = rows.filter((row) => row.index > 0);
    const size = Math.max(1, Math.ceil(steps.length / MOST_COLUMNS));
    const bins = [];
    for (let i = 0; i < steps.length; i += size) {
      const part = steps.slice(i, i + size);
      const mean = (key) => part.reduce((sum, row) => sum + row.step[key], 0) / part.length;
      bins.push({ from: part[0].index, to: part[part.length - 1].index, draft: mean("draft_ms"), verify: mean("verify_ms"), overhead: mean("overhead_ms") });
    }
    const total = (bin) => bin.draft + bin.verify + bin.overhead;
    const most = Math.max(...bins.map(total), 0);
    const plot = h("div.rl-plot-time", { "aria-hidden": "true" });
    for (const bin of bins) {
      const column = h("span", { title: `${size > 1 ? `steps ${bin.from} to ${bin.to}, on average` : `step ${bin.from}`}: draft ${fmt.ms(bin.draft)}, verify ${fmt.ms(bin.verify)}, overhead ${fmt.ms(bin.overhead)}` });
      for (const part of ["overhead", "verify", "draft"]) {
        if (bin[part] > 0) column.append(h("i", { "data-part": part, style: `height:${((100 * bin[part]) / most).toFixed(2)}%` }));
      }
      plot.append(column);
    }
    return { plot, bins, size, most, last: steps.length };
  };

  const figure = (title, note, plot, words, numbers) => h("figure.rl-plot", {},
    h("figcaption.rl-sub", {}, title, h("span.rl-aside", { text: note })), plot, h("p.rl-hidden", { text: words }),
    h("details.rl-behind", {}, h("summary", { text: "as a table" }), numbers));

  R.views.charts = (root) => {
    const body = h("div.rl-plots");
    const empty = h("p.rl-empty", { text: "When a run is over, its patterns stand here: which positions were accepted, how many at a time, and where the time went." });
    root.append(h("div.rl-head", {}, h("h2.rl-title", { text: "Patterns" }), h("span.rl-aside", { text: "of the whole run" })), empty, body);

    const draw = () => {
      const { rows, live, end } = store.state;
      const ready = rows.length > 1 && end && !live;
      empty.hidden = Boolean(ready);
      R.clear(body);
      if (!ready) return;
      const { spec, positions, histogram } = count();
      if (spec) {
        body.append(
          figure("Accepted by position", `share of ${fmt.count(spec, "drafting step")}`,
            columns(positions.map((share, n) => ({ name: String(n + 1), value: share, words: fmt.pct(share), said: `draft position ${n + 1}: accepted in ${fmt.pct(share)} of the drafting steps` })), 1),
            positions.map((share, n) => `position ${n + 1}: ${fmt.pct(share)}`).join(", "),
            table(["position", "accepted"], positions.map((share, n) => [String(n + 1), fmt.pct(share)]))),
          figure("Accepted per step", "steps that kept 0, 1, 2 … drafts",
            columns(histogram.map((n, kept) => ({ name: String(kept), value: n, words: String(n), said: `${fmt.count(n, "step")} kept ${fmt.count(kept, "draft token")}` })), Math.max(...histogram)),
            histogram.map((n, kept) => `${kept} kept: ${fmt.count(n, "step")}`).join(", "),
            table(["kept", "steps"], histogram.map((n, kept) => [String(kept), String(n)]))),
        );
      } else body.append(h("p.rl-hint", { text: "Nothing was drafted, so there is no acceptance to chart." }));
      const strip = timeStrip(rows);
      body.append(figure("Time per step", `up to ${fmt.ms(strip.most)}${strip.size > 1 ? `, averages of ${strip.size} steps` : ""}`, strip.plot,
        `Time per step of ${strip.last} steps, at most ${fmt.ms(strip.most)}`,
        table(["step", "draft ms", "verify ms", "overhead ms"], strip.bins.map((bin) => [bin.from === bin.to ? String(bin.from) : `${bin.from}–${bin.to}`, bin.draft.toFixed(1), bin.verify.toFixed(1), bin.overhead.toFixed(1)]))));
      body.lastElementChild.classList.add("rl-plot-wide");
    };
    draw();
    return (event) => {
      if (event === "run" || event === "end") draw();
    };
  };
})();
