/* Five headline numbers, each with its definition and this run's own arithmetic; the break-even sentence; the rest. */
(() => {
  "use strict";
  const R = window.Redline;
  R.views = R.views || {};
  if (R.views.numbers) return;
  const { h, fmt, store } = R;

  /** The numbers of the run: the feed's final metrics, or, while it is live, the same sums over the steps so far. */
  const figures = () => {
    const { end, rows, run } = store.state;
    if (end && end.metrics) return end.metrics;
    const t = store.totals;
    const decode = t.draft + t.verify + t.overhead;
    const decodeSteps = rows.length ? rows.length - 1 : 0;
    return {
      num_draft_tokens: t.drafted, num_accepted_draft_tokens: t.accepted, num_spec_steps: t.spec,
      num_plain_steps: rows.filter((r) => r.index > 0 && !r.step.drafts.length).length,
      draft_acceptance_rate: t.drafted ? t.accepted / t.drafted : null,
      mean_acceptance_length: t.spec ? 1 + t.accepted / t.spec : null,
      num_decode_steps: decodeSteps, num_decode_tokens: t.decodeTokens, draft_ms: t.draft, verify_ms: t.verify,
      overhead_ms: t.overhead, decode_ms: decode, tokens_per_second: t.decodeTokens && decode > 0 ? (1000 * t.decodeTokens) / decode : null,
      ms_per_token: t.decodeTokens ? decode / t.decodeTokens : null, tokens_per_step: decodeSteps ? t.decodeTokens / decodeSteps : null,
      not_speculating: run && run.metrics ? run.metrics.not_speculating : null,
    };
  };

  const WAIT = "…";
  const plainRun = () => store.state.run && store.state.run.proposer === "none";
  const nothingDrafted = (m) => (plainRun() ? "no proposer" : m.not_speculating || store.state.end ? "nothing drafted" : WAIT);

  /** name -> {value, words, tip}: what stands large, what it is called, and definition with formula. */
  const HEADLINES = {
    speed: (m) => ({
      value: fmt.known(m.tokens_per_second) ? fmt.fixed(m.tokens_per_second, 1) : WAIT,
      words: "tokens per second",
      tip: ["How fast the answer grew after its first token.", "tokens decoded ÷ decode time", fmt.known(m.tokens_per_second) ? `${fmt.int(m.num_decode_tokens)} ÷ ${fmt.fixed(m.decode_ms / 1000, 2)} s = ${fmt.fixed(m.tokens_per_second, 1)}` : ""],
    }),
    speedup: () => {
      const { end, live } = store.state;
      const b = end && end.break_even;
      const reason = end ? end.no_baseline_reason : live ? "not measured yet" : "";
      if (plainRun()) {
        return {
          value: "baseline", small: true, words: "others are measured against this run",
          tip: ["This run drafts nothing: it is what a speed-up is measured against.", "baseline ms per token ÷ a run's ms per token", ""],
        };
      }
      return {
        value: b ? `${fmt.fixed(b.speedup, 2)}×` : "no baseline",
        small: !b,
        words: b ? "against its measured baseline" : reason || "the same request was not run with the proposer off",
        tip: ["Measured, never estimated: the same prompt, seed, sampling, weights, dtype and device with the proposer off.", "baseline ms per token ÷ this run's ms per token", b ? `${fmt.ms1(b.baseline_ms_per_token)} ÷ ${fmt.ms1(b.ms_per_token)} = ${fmt.fixed(b.speedup, 2)}` : reason ? `No number here: ${reason}.` : ""],
      };
    },
    length: (m) => ({
      value: fmt.known(m.mean_acceptance_length) ? fmt.fixed(m.mean_acceptance_length, 2) : nothingDrafted(m),
      small: !fmt.known(m.mean_acceptance_length) && nothingDrafted(m) !== WAIT,
      words: "mean acceptance length",
      tip: ["Tokens that a drafting step commits on average: its kept drafts and the target's own token.", "1 + accepted ÷ drafting steps", fmt.known(m.mean_acceptance_length) ? `1 + ${fmt.int(m.num_accepted_draft_tokens)} ÷ ${fmt.int(m.num_spec_steps)} = ${fmt.fixed(m.mean_acceptance_length, 2)}` : ""],
    }),
    rate: (m) => ({
      value: fmt.known(m.draft_acceptance_rate) ? fmt.pct(m.draft_acceptance_rate) : nothingDrafted(m),
      small: !fmt.known(m.draft_acceptance_rate) && nothingDrafted(m) !== WAIT,
      words: "of the drafts accepted",
      tip: ["Acceptance rate. Alone it proves nothing: a slow draft that is often right can still lose.", "accepted ÷ drafted", fmt.known(m.draft_acceptance_rate) ? `${fmt.int(m.num_accepted_draft_tokens)} ÷ ${fmt.int(m.num_draft_tokens)} = ${fmt.pct(m.draft_acceptance_rate)}` : ""],
    }),
    first: () => {
      const { run, rows } = store.state;
      const known = run && run.ttft_ms > 0;
      return {
        value: known ? fmt.ms(run.ttft_ms) : WAIT,
        words: "to the first token",
        tip: ["From the start of the request to the first token. Speculation does not help here.", "waiting + prefill + first choice", known && rows.length ? `of it ${fmt.ms(run.prefill_ms)} prefill (${fmt.count(run.num_prompt_tokens, "prompt token")})` : ""],
      };
    },
  };

  const FINISH = {
    eos: "the target wrote its end-of-text token", stop: "a stop string or id", length: "the limit of new tokens",
    cancelled: "stopped by a person", error: "an error",
  };

  const secondary = (m) => {
    const { run, meta, live, rows } = store.state;
    const ended = run.finish_reason ? FINISH[run.finish_reason] : live ? "still running" : meta && meta.state === "interrupted" ? "interrupted" : "unknown";
    return [
      ["Prefill", run.prefill_ms > 0 ? fmt.ms(run.prefill_ms) : WAIT, "The target's pass over the prompt; apart from decoding."],
      ["Decode", m.num_decode_steps ? fmt.ms(m.decode_ms) : WAIT, "All steps after the first token: draft + verify + overhead."],
      ["Steps", `${fmt.int(m.num_decode_steps)}${m.num_plain_steps && m.num_spec_steps ? ` (${fmt.int(m.num_plain_steps)} undrafted)` : ""}`, "Rounds of propose, verify, commit, after the first token."],
      ["Tokens", fmt.int(store.totals.tokens), "Tokens in the answer, the first one included."],
      ["Tokens per step", fmt.known(m.tokens_per_step) ? fmt.fixed(m.tokens_per_step, 2) : rows.length ? "no step yet" : WAIT, "Of all steps, drafting or not, corrections and bonus tokens included."],
      ["Ended by", ended, "Why the run stopped."],
      ...special(run),
    ];
  };

  /** What a reader must know before comparing this run with others. */
  const special = (run) => {
    const versions = run.versions || {};
    const found = [];
    if (versions.draft_vocabulary) {
      found.push(["Draft's vocabulary", versions.draft_vocabulary, "The draft's tokens are not the target's: sampled, it drafts over the tokens that both have; greedy, its text is split into the target's tokens."]);
    }
    if (versions.draft_scores) {
      found.push(["Draft scores", versions.draft_scores, "The rest it never drafts, which spares most of the reading of its output matrix. The text stays the target's."]);
    }
    if (versions.earlier_runs) {
      found.push(["Earlier runs", versions.earlier_runs, "Their outputs were drafted from, too: a prompt that was asked before looks magically fast."]);
    }
    return found;
  };

  /** Which term is to blame, in words: the sentence's own numbers come from the verdict's fields. */
  const blamed = (b) => {
    const saved = Math.max(0, b.tokens_per_step - 1);
    const gain = `saves ${fmt.fixed(saved, 1)} tokens (${fmt.ms1(saved * b.baseline_ms_per_token)} ms)`;
    if (b.blame === "draft") return `Drafting costs ${fmt.ms1(b.draft_ms)} ms a step and ${gain}.`;
    if (b.blame === "verify") {
      return `Verifying a step costs ${fmt.ms1(b.verify_ms)} ms, ${fmt.ms1(b.verify_ms - b.baseline_ms_per_token)} ms more than one plain token, and ${gain}.`;
    }
    if (b.blame === "overhead") return `Overhead costs ${fmt.ms1(b.overhead_ms)} ms a step and drafting ${gain}.`;
    return `Too few draft tokens were accepted: a step ${gain}, less than the little it costs.`;
  };

  const breakEven = (box) => {
    const { end, live, run } = store.state;
    const b = end && end.break_even;
    box.dataset.verdict = b ? (b.pays ? "pays" : "loses") : "none";
    if (!b) {
      const why = end && end.no_baseline_reason;
      box.replaceChildren(
        h("b", { text: plainRun() ? "Plain decoding. " : "No verdict yet. " }),
        plainRun() ? "This run is what others are measured against." : live ? "Whether it pays is known when the run and its baseline are done." : `Whether it pays cannot be said without a baseline: ${why || "none was run"}.`,
      );
      return;
    }
    const term = (key, words) => h(b.blame === key ? "span.rl-blame" : "span", { text: words });
    const blame = b.pays ? "" : ` ${blamed(b)}`;
    box.replaceChildren(
      h("b.rl-verdict", { text: b.pays ? "Pays. " : "Does not pay. " }), "(",
      term("draft", `draft ${fmt.ms1(b.draft_ms)}`), " + ", term("verify", `verify ${fmt.ms1(b.verify_ms)}`), " + ",
      term("overhead", `overhead ${fmt.ms1(b.overhead_ms)} ms`), ") ÷ ", term("acceptance", `${fmt.fixed(b.tokens_per_step, 2)} tokens`), " = ",
      h("b", { text: `${fmt.ms1(b.ms_per_token)}\u00a0ms` }), " per token, baseline ", h("b", { text: `${fmt.ms1(b.baseline_ms_per_token)}\u00a0ms` }), ".", blame,
    );
    box.title = `Break-even, all per step of ${run.proposer}: speculation pays when the left side is below the baseline.`;
  };

  /** What the run ran on, and why not on something faster; how far from reading the weights once per token. */
  const machine = (box, m) => {
    const { run, end, live } = store.state;
    const v = run.versions || {};
    const ran = (role) => {
      const note = v[`${role}_path_note`];
      const path = v[`${role}_path`];
      const how = path === "compiled kernel" ? "used the compiled kernel" : /^(eager|compiled)/.test(path) ? `was ${path}` : `used ${path.replace(/^CUDA graph\b/, "CUDA graphs")}`;
      if (note || !/^compiled/.test(path)) return `${how}${note ? `: ${note}` : ""}`;
      const limits = [];
      if (run.k + 1 > Number(v[`${role}_compiled_width`]) && run.proposer !== "none" && role === "target") limits.push(`passes of at most ${v[`${role}_compiled_width`]} tokens`);
      if (run.num_prompt_tokens + store.totals.tokens > Number(v[`${role}_compiled_context`])) limits.push(`the first ${fmt.int(Number(v[`${role}_compiled_context`]))} tokens of text`);
      return `${how}${limits.length ? ` for ${limits.join(" and ")}, eager beyond` : ""}`;
    };
    const words = [];
    const floor = run.floor_ms;
    if (fmt.known(floor) && floor > 0 && fmt.known(m.ms_per_token)) {
      words.push(
        h("b", { text: `${fmt.ms1(m.ms_per_token)}\u00a0ms` }), ` per token${live && !end ? " so far" : ""}, `,
        h("b", { text: `${fmt.fixed(m.ms_per_token / floor, 1)} times` }),
        ` the time it takes to read the weights once (${fmt.ms1(floor)}\u00a0ms). `,
      );
    }
    if (v.target_path) words.push(h("span", { "data-path": "target", text: `This run ${ran("target")}.` }));
    if (v.draft_path) words.push(" ", h("span", { "data-path": "draft", text: `Its draft ${ran("draft")}.` }));
    box.hidden = !words.length;
    box.replaceChildren(...words);
    const bytes = Number(v.target_bytes_per_token);
    const speed = Number(v.read_bytes_per_second);
    box.title = floor ? `${fmt.int(bytes / 1e6)} MB of weights at ${fmt.fixed(speed / 1e9, 1)} GB/s, measured on the machine that ran this. One token alone cannot take less; tokens that are verified together share one reading.` : "";
  };

  const splitBar = (box, m) => {
    const total = m.draft_ms + m.verify_ms + m.overhead_ms;
    R.clear(box);
    if (!(total > 0)) return;
    const strip = h("span.rl-split-bar", { role: "img", "aria-label": `Time split: draft ${fmt.pct(m.draft_ms / total)}, verify ${fmt.pct(m.verify_ms / total)}, overhead ${fmt.pct(m.overhead_ms / total)}` });
    const words = h("span.rl-key");
    for (const [part, ms] of [["draft", m.draft_ms], ["verify", m.verify_ms], ["overhead", m.overhead_ms]]) {
      if (ms > 0) strip.append(h("i", { "data-part": part, style: `flex-grow:${(ms / total).toFixed(4)}` }));
      if (ms > 0) words.append(h("span", {}, h("i", { "data-part": part }), `${part} ${fmt.pct(ms / total)}`));
    }
    box.append(strip, words);
  };

  let serial = 0;
  R.views.numbers = (root) => {
    const cells = {};
    const grid = h("div.rl-figures", { role: "group", "aria-label": "Headline numbers" });
    for (const key of Object.keys(HEADLINES)) {
      const id = `rl-tip-${(serial += 1)}`;
      const cell = {
        value: h("span.rl-figure-value", { text: "" }), words: h("span.rl-figure-words"),
        what: h("span"), formula: h("span.rl-formula"), own: h("span.rl-formula.rl-own"),
      };
      cell.box = h("div.rl-figure", { "data-key": key, tabindex: "0", role: "group", "aria-describedby": id }, cell.value, cell.words,
        h("span.rl-tip", { id, role: "tooltip" }, cell.what, cell.formula, cell.own));
      grid.append(cell.box);
      cells[key] = cell;
    }
    const notSpeculating = h("p.rl-warning", { hidden: true });
    const verdict = h("p.rl-break-even");
    const list = h("dl.rl-facts");
    const ranOn = h("p.rl-machine");
    const split = h("div.rl-split");
    const empty = h("p.rl-blank", { text: "Speed, measured speed-up, acceptance and time to first token stand here after a run." });
    root.append(h("h2.rl-title.rl-hidden", { text: "Numbers" }), notSpeculating, empty, grid, verdict, split, list, ranOn);

    const draw = () => {
      const { run } = store.state;
      empty.hidden = Boolean(run);
      grid.hidden = verdict.hidden = list.hidden = split.hidden = ranOn.hidden = !run;
      if (!run) {
        notSpeculating.hidden = true;
        return;
      }
      const m = figures();
      for (const [key, make] of Object.entries(HEADLINES)) {
        const { value, words, tip, small } = make(m);
        const cell = cells[key];
        cell.box.setAttribute("aria-label", `${value} ${words}`);
        R.setText(cell.value, value);
        cell.value.classList.toggle("rl-figure-wordy", Boolean(small));
        R.setText(cell.words, words);
        R.setText(cell.what, tip[0]);
        R.setText(cell.formula, tip[1]);
        R.setText(cell.own, tip[2] || "");
      }
      notSpeculating.hidden = !m.not_speculating;
      if (m.not_speculating) notSpeculating.replaceChildren(h("b", { text: "Not speculating: " }), `${m.not_speculating}${/[.!?]$/.test(m.not_speculating) ? "" : "."}`);
      breakEven(verdict);
      splitBar(split, m);
      machine(ranOn, m);
      list.replaceChildren(...secondary(m).map(([term, value, hint]) => h("div", { title: hint }, h("dt", { text: term }), h("dd", { text: value }))));
    };
    draw();
    return (event) => {
      if (["run", "steps", "end"].includes(event)) draw();
    };
  };
})();
