/* The one state of the page: the run from the feed, the position of the replay, what is selected. Views subscribe.

   `feed(text)` takes the whole NDJSON text each time and parses only its new lines. Events: "run" (another run),
   "steps" {from}, "end", "position" {from, to}, "selection" {from, to, focus}, "hover", "play", "parts" [rows]. */
(() => {
  "use strict";
  const R = window.Redline;
  if (R.store) return;

  const state = {
    seq: null, live: false, run: null, meta: null, rows: [], end: null, problems: [],
    position: -1, follow: true, playing: false, speed: 1, selection: null, chosen: "", hover: null,
  };
  const totals = { drafted: 0, accepted: 0, spec: 0, tokens: 0, decodeTokens: 0, draft: 0, verify: 0, overhead: 0 };
  const views = new Set();
  let consumed = 0;
  let firstLine = "";
  let open = [];
  let previous = null;
  const labels = new Map();

  const notify = (event, detail) => {
    for (const view of [...views]) {
      try {
        view(event, detail || {});
      } catch (error) {
        console.error("Redline view failed on", event, error);
      }
    }
  };

  /** Call `view(event, detail)` on each change; returns the function that ends it. */
  const subscribe = (view) => {
    views.add(view);
    return () => views.delete(view);
  };

  // --- feed -----------------------------------------------------------------------------------------------------

  const feed = (text) => {
    const whole = typeof text === "string" ? text : "";
    if (!whole) return;
    if (!firstLine || whole.length < consumed || !whole.startsWith(firstLine)) {
      consumed = 0;
      firstLine = "";
    }
    const from = state.rows.length;
    let ended = false;
    let fresh = false;
    for (;;) {
      const newline = whole.indexOf("\n", consumed);
      if (newline < 0) break;
      const line = whole.slice(consumed, newline);
      if (!firstLine) firstLine = whole.slice(0, newline + 1);
      consumed = newline + 1;
      if (!line) continue;
      let entry;
      try {
        entry = JSON.parse(line);
      } catch (error) {
        state.problems.push(String(error));
        continue;
      }
      if (entry.type === "begin") {
        // The same run again, whole, after its last part: what is drawn stays.
        if (entry.seq === state.seq && state.run && state.run.id === entry.run.id) continue;
        begin(entry);
        fresh = true;
      } else if (entry.type === "step") {
        // A step may come twice (see feed.tail); one that comes too early waits for the whole feed.
        if (entry.step.index === state.rows.length) addStep(entry.step);
        // Times that were not known when the run began come with its first step.
        for (const name of ["prefill_ms", "ttft_ms"]) if (state.run && Number.isFinite(entry[name])) state.run[name] = entry[name];
      } else if (entry.type === "resume" && entry.seq !== state.seq) break;
      else if (entry.type === "end") {
        state.end = entry;
        state.run = entry.run;
        ended = true;
      }
    }
    if (fresh) notify("run");
    const start = fresh ? 0 : from;
    if (state.rows.length > start) {
      notify("steps", { from: start });
      if (state.follow) moveTo(state.rows.length - 1, { quiet: true, still: true });
    }
    if (ended) {
      closeParts();
      markEnd();
      state.live = false;
      notify("end");
      if (!state.selection) selectDefault();
    }
  };

  const begin = (entry) => {
    stopPlaying();
    Object.assign(state, {
      seq: entry.seq, live: Boolean(entry.live), run: entry.run, meta: entry.meta || null, rows: [], end: null,
      problems: [], position: -1, follow: true, selection: null, chosen: "", hover: null,
    });
    for (const name of Object.keys(totals)) totals[name] = 0;
    open = [];
    previous = null;
    labels.clear();
  };

  /** Labels by token id, from every list that the steps kept: what a token that adds no text would be called. */
  const learn = (step) => {
    for (const list of [step.drafts, step.residual_top, ...step.drafts.flatMap((d) => [d.top_p, d.top_q])]) {
      for (const { id, text } of list) labels.set(id, text);
    }
  };

  const addStep = (step) => {
    learn(step);
    const row = R.model.build(step, (id) => labels.get(id) || "");
    state.rows.push(row);
    totals.tokens += step.emitted.length;
    if (step.index > 0) {
      totals.decodeTokens += step.emitted.length;
      totals.draft += step.draft_ms;
      totals.verify += step.verify_ms;
      totals.overhead += step.overhead_ms;
    }
    if (step.drafts.length) {
      totals.spec += 1;
      totals.drafted += step.drafts.length;
      totals.accepted += row.accepted;
    }
    joinParts(row);
  };

  /** True for a token such as ` \xF0\x9F`, which adds a space and begins a character. */
  const endsInBytes = (token) => {
    const label = labels.get(token.id) || "";
    return label.startsWith(token.flow) && /^(\\x[0-9A-F]{2})+$/.test(label.slice(token.flow.length));
  };

  /** Tokens that add nothing to the text yet wait for the one that completes the character. */
  const joinParts = (row) => {
    const touched = new Set();
    for (const index of row.order) {
      const token = row.tokens[index];
      if (!token.emitted) continue;
      const before = previous;
      previous = token;
      if (token.flow === "") {
        if (!open.length && before && endsInBytes(before)) open.push(before);
        open.push(token);
        continue;
      }
      if (!open.length) continue;
      const group = [...open, token];
      group.forEach((member, n) => {
        member.part = { n: n + 1, of: group.length, text: token.flow, group };
        touched.add(member.step);
      });
      open = [];
    }
    if (touched.size) notify("parts", { rows: [...touched].filter((index) => index !== row.index) });
  };

  /** Mark what stands behind the answer's end: the end token, or the stop string, as `beyond` characters per token. */
  const markEnd = () => {
    const { run, rows } = state;
    if (!["eos", "stop"].includes(run.finish_reason) || !Number.isInteger(run.num_text_chars)) return;
    const kept = rows.flatMap((row) => row.order.map((index) => row.tokens[index]).filter((token) => token.emitted));
    const size = (token) => [...(token.flow || "")].length;
    let surplus = kept.reduce((sum, token) => sum + size(token), 0) - run.num_text_chars;
    for (let i = kept.length - 1; i >= 0 && surplus > 0; i -= 1) {
      kept[i].beyond = Math.min(surplus, size(kept[i]));
      surplus -= kept[i].beyond;
    }
  };

  const closeParts = () => {
    for (const token of open) token.silent = true;
    const rows = [...new Set(open.map((token) => token.step))];
    open = [];
    if (rows.length) notify("parts", { rows });
  };

  // --- position and selection -------------------------------------------------------------------------------------

  const last = () => state.rows.length - 1;

  /** Show the state after step `index`. While a run is live, the last step keeps following the feed. `quiet`: nothing
      is said aloud; `still`: nothing scrolls. */
  const moveTo = (index, { select = false, quiet = false, still = false, focus = false } = {}) => {
    const to = Math.max(Math.min(index, last()), Math.min(0, last()));
    const from = state.position;
    state.follow = !state.live || to === last();
    if (to !== from) {
      state.position = to;
      notify("position", { from, to, quiet, still });
    }
    const beyond = state.selection && state.selection.step > to;
    if (to >= 0 && (select || beyond)) {
      choose({ step: to, token: R.model.decisive(state.rows[to]) }, { focus, by: focus ? "token" : "step" });
    }
  };

  const valid = (place) => {
    const row = place && state.rows[place.step];
    return Boolean(row && row.tokens[place.token]);
  };
  const same = (a, b) => a === b || (a && b && a.step === b.step && a.token === b.token);

  /** Select {step, token} everywhere. `by` says who chose: "token" a person pointed at it, "step" it came with the step
      on show, "" a default that the address does not mention. */
  const choose = (place, { by = "token", focus = false } = {}) => {
    const to = valid(place) ? { step: place.step, token: place.token } : null;
    const from = state.selection;
    const before = state.chosen;
    state.chosen = to === null ? "" : by;
    if (same(from, to) && !focus) {
      if (before !== state.chosen) notify("chosen");
      return;
    }
    state.selection = to;
    notify("selection", { from, to, focus });
  };

  const selectDefault = () => {
    const row = state.rows.find((r) => r.rejected) || state.rows[1] || state.rows[0];
    if (row && row.tokens.length) choose({ step: row.index, token: R.model.decisive(row) }, { by: "" });
  };

  const hover = (place) => {
    const to = valid(place) ? place : null;
    if (same(state.hover, to)) return;
    const from = state.hover;
    state.hover = to;
    notify("hover", { from, to });
  };

  const token = (place) => (valid(place) ? state.rows[place.step].tokens[place.token] : null);

  /** The next (or previous) token in reading order; steps beyond the position are moved to. */
  const neighbour = (direction, accept = () => true) => {
    let place = state.selection;
    if (!place) {
      const row = state.rows[Math.max(0, state.position)];
      return row && row.order.length ? { step: row.index, token: row.order[0] } : null;
    }
    let step = place.step;
    let at = state.rows[step].order.indexOf(place.token) + direction;
    for (;;) {
      const row = state.rows[step];
      while (at >= 0 && at < row.order.length) {
        if (accept(row.tokens[row.order[at]])) return { step, token: row.order[at] };
        at += direction;
      }
      step += direction;
      if (step < 0 || step > last()) return null;
      at = direction > 0 ? 0 : state.rows[step].order.length - 1;
    }
  };

  const moveToken = (direction, accept) => {
    const place = neighbour(direction, accept);
    if (!place) return;
    if (place.step > state.position) moveTo(place.step);
    choose(place, { focus: true });
  };

  const moveStep = (direction, { focus = false } = {}) => {
    stopPlaying();
    moveTo(Math.max(0, state.position + direction), { select: true, focus });
  };

  // --- playing ----------------------------------------------------------------------------------------------------

  let timer = 0;
  const stopPlaying = () => {
    if (!state.playing) return;
    state.playing = false;
    clearTimeout(timer);
    notify("play");
  };

  /** Milliseconds that step `index` stays on: by tempo, or as measured (speed 0). */
  const pause = (index) => {
    const row = state.rows[index];
    if (state.speed > 0) return 1000 / state.speed;
    return row ? Math.max(16, row.ms) : 16;
  };

  const tick = () => {
    if (!state.playing) return;
    if (state.position >= last()) {
      stopPlaying();
      return;
    }
    moveTo(state.position + 1, { select: state.speed > 0 && state.speed <= 2, quiet: true });
    timer = setTimeout(tick, pause(state.position + 1));
  };

  const play = () => {
    if (state.playing || last() < 1) return;
    if (state.position >= last()) moveTo(0, { select: true, quiet: true });
    state.playing = true;
    notify("play");
    timer = setTimeout(tick, pause(state.position + 1));
  };

  const setSpeed = (speed) => {
    state.speed = speed;
    notify("play");
  };

  R.store = {
    state, totals, subscribe, notify, moveTo, moveStep, moveToken, choose, hover, token, valid, last, play,
    stop: stopPlaying, setSpeed,
  };
  R.feed = feed;
})();
