/* The right column: why the selected token went, stayed or came, in one sentence and as bars. */
(() => {
  "use strict";
  const R = window.Redline;
  R.views = R.views || {};
  if (R.views.why) return;
  const { h, fmt, store, text } = R;

  const ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"];
  const ordinal = (n) => ORDINALS[n] || `${n + 1}th`;

  const name = (words, id) => h("b.rl-say", { title: id === undefined ? null : `token ${id}` }, ...quote(words));
  const quote = (words) => {
    const holder = h("span");
    if (words) text.render(holder, words, "chip", 28);
    else holder.append("a part of a character");
    return [...holder.childNodes];
  };
  const strong = (words) => h("b", { text: words });

  /** Who drafts, in words, and whether it has probabilities. */
  const proposer = () => {
    const run = store.state.run || {};
    const who = {
      "draft-model": ["The draft", true], ngram: ["Prompt lookup", false], suffix: ["Suffix decoding", false], prediction: ["The prediction", false],
      "early-exit": ["The early exit", true], eagle3: ["The head", true], eagle: ["The head", true], mtp: ["The MTP layer", true],
      medusa: ["The heads", true],
    }[run.proposer];
    return who || ["The draft", true];
  };
  const greedy = () => {
    const sampling = store.state.run && store.state.run.request && store.state.run.request.sampling;
    return Boolean(sampling) && Number(sampling.temperature) === 0;
  };
  const oneHot = (draft) => !proposer()[1] || (draft.q >= 1 && (!greedy() || !draft.top_q.length) && !draft.top_q.some((t) => t.probability < 1));

  /** Words may be strings or elements; the sentence is their concatenation. */
  const wanted = (token) => {
    const [who] = proposer();
    return oneHot(token.draft)
      ? [`${who} proposed `, name(token.label, token.id)]
      : [`${who} wanted `, name(token.label, token.id), ` with ${fmt.pct(token.draft.q)}`];
  };

  const place = (row, token) => (row.own === token ? "came" : `step ${row.index}, ${ordinal(depth(row, token))} draft`);
  const depth = (row, token) => {
    let n = 0;
    let at = token.draft.parent;
    while (at !== null && at !== undefined) {
      n += 1;
      at = row.step.drafts[at].parent;
    }
    return n;
  };

  const odds = (draft) => {
    const a = draft.accept_prob;
    if (fmt.known(a) && a >= 1) return null;
    if (oneHot(draft)) return ["It may stay with that probability, ", strong(fmt.prob(a)), "."];
    return [`It may stay with probability ${fmt.prob(draft.p)}\u00a0÷\u00a0${fmt.prob(draft.q)} = `, strong(fmt.prob(a)), "."];
  };

  const accepted = (row, token) => {
    const d = token.draft;
    if (greedy()) return [...wanted(token), `; it is also the target's first choice (${fmt.pct(d.p)}): `, strong("accepted"), "."];
    const lead = [...wanted(token), `; the target gives it ${fmt.pct(d.p)}. `];
    const chance = odds(d);
    if (!chance) return [...lead, "The target likes it at least as much as the draft did, so it stays for certain: ", strong("accepted"), "."];
    return [...lead, ...chance, " The draw was ", strong(fmt.prob(d.u)), ", below it: ", strong("accepted"), "."];
  };

  /** What stands in place of a rejected draft: a sibling that was kept (trees), else the target's own token. */
  const instead = (row, token) => {
    const kept = row.tokens.find((t) => t.mark === "accepted" && t.draft.parent === token.draft.parent);
    if (kept) return kept;
    return row.own && row.own.mark === "corrected" ? row.own : null;
  };

  const rejected = (row, token) => {
    const d = token.draft;
    const put = instead(row, token);
    if (greedy()) {
      return [
        ...wanted(token), `; the target gives it ${fmt.pct(d.p)}`,
        ...(put ? [", but its own first choice is ", name(put.label, put.id), ` with ${fmt.pct(put.emitted.p)}`] : []),
        ". Greedy keeps only the first choice: ", strong("rejected"), ".",
      ];
    }
    const after = !put ? [] : put.draft
      ? [" Its sibling ", name(put.label, put.id), " was kept instead."]
      : [" From what was left over, ", name(put.label, put.id), " was drawn."];
    return [
      ...wanted(token), `; the target gives it ${fmt.pct(d.p)}. `, ...(odds(d) || []), " The draw was ", strong(fmt.prob(d.u)),
      ", above it: ", strong("rejected"), ".", ...after,
    ];
  };

  const untested = (row, token) => {
    const lead = wanted(token);
    const siblings = row.tokens.filter((t) => t.draft && t !== token && t.draft.parent === token.draft.parent);
    const kept = siblings.find((t) => t.mark === "accepted");
    if (kept) return [...lead, ", but ", name(kept.label, kept.id), " was kept in this place, so this branch was ", strong("never tested"), "."];
    const blocker = row.rejected && ancestor(row, token) ? ancestor(row, token) : row.chain ? row.rejected : null;
    if (blocker) {
      return [...lead, ", behind ", name(blocker.label, blocker.id), ". That one was rejected, so what was written behind it rests on a wrong prefix: ", strong("never tested"), ", thrown away."];
    }
    const run = store.state.run || {};
    const ends = { eos: "The text ended before it", stop: "A stop string ended the text before it", length: "The token limit was reached before it", cancelled: "The run was stopped before it" };
    const lastRow = row.index === store.last();
    return [...lead, `. ${(lastRow && ends[run.finish_reason]) || "It stands on a branch that was not taken"}: `, strong("never tested"), ", thrown away."];
  };
  const ancestor = (row, token) => {
    let at = token.draft.parent;
    while (at !== null && at !== undefined) {
      if (row.tokens[at].mark === "rejected") return row.tokens[at];
      at = row.step.drafts[at].parent;
    }
    return null;
  };

  const corrected = (row, token) => {
    const went = row.rejected;
    const e = token.emitted;
    const lead = ["The target put ", name(token.label, token.id), " in place of ", ...(went ? [name(went.label, went.id)] : ["the rejected draft"]), ". "];
    if (greedy()) return [...lead, `It is the target's first choice with ${fmt.pct(e.p)}: `, strong("corrected"), "."];
    const share = row.step.residual_top.find((t) => t.id === token.id);
    return [
      ...lead, "It was drawn from what the target wants beyond what the draft already offered",
      ...(share ? [", where it holds ", strong(fmt.pct(share.probability))] : []), `; the target itself gives it ${fmt.pct(e.p)}. This keeps the target's distribution exact.`,
    ];
  };

  const bonus = (row, token) => {
    const n = row.accepted;
    const all = row.chain ? (n === 1 ? "The one draft was kept" : `All ${n} drafts were kept`) : `The whole branch of ${n} drafts was kept`;
    return [
      `${all}, and the target's one pass had already looked one token further. So `, name(token.label, token.id), " came for free: ",
      greedy() ? `the target's first choice with ${fmt.pct(token.emitted.p)}. ` : `drawn from the target's own distribution, where it has ${fmt.pct(token.emitted.p)}. `, strong("Bonus"), ".",
    ];
  };

  const target = (row, token) => {
    const own = greedy() ? `its first choice with ${fmt.pct(token.emitted.p)}` : `drawn with ${fmt.pct(token.emitted.p)}`;
    if (row.index === 0) return ["The first token. Reading the prompt gives it, before anything can be drafted: ", name(token.label, token.id), `, ${own}.`];
    const run = store.state.run || {};
    const reasons = {
      none: "This run has no proposer", ngram: "Prompt lookup found nothing to copy", suffix: "Nothing likely had followed the end of the text before", prediction: "The prediction had nothing to offer here",
    };
    // A length of 0, or a draft that was not sure enough, is its own reason.
    const why = row.step.k_reason && (row.step.k === 0 || !reasons[run.proposer]) ? `Nothing was drafted (${row.step.k_reason})` : null;
    const reason = why || reasons[run.proposer] || "Nothing was drafted in this step";
    return [`${reason}, so the target wrote `, name(token.label, token.id), ` itself: ${own}.`];
  };

  const SENTENCES = { accepted, rejected, untested, corrected, bonus, target };
  const VERBS = { accepted: "stayed", rejected: "went", untested: "was never tested", corrected: "came in", bonus: "came on top", target: "was written" };

  // --- bars -------------------------------------------------------------------------------------------------------

  const bar = (share, kind) => h("span.rl-gauge", { "data-kind": kind }, h("i", { style: `width:${(100 * Math.max(0, Math.min(1, share || 0))).toFixed(2)}%` }));

  const lineOf = (words, share, kind, chosen, id) =>
    h("div.rl-bar-row", { "data-chosen": chosen ? "" : null, title: `token ${id}` },
      h("span.rl-bar-name", {}, ...quote(words)), bar(share, kind), h("span.rl-num", { text: fmt.pct(share) }));

  /** The likeliest tokens; a chosen token outside the five gets a row of its own below them. */
  const block = (title, note, list, kind, extra) => {
    const found = h("section.rl-dist", {}, h("h3.rl-sub", {}, title, h("span.rl-aside", { text: note })));
    for (const top of list) found.append(lineOf(top.text, top.probability, kind, extra && top.id === extra.id, top.id));
    if (extra && fmt.known(extra.probability) && !list.some((top) => top.id === extra.id)) {
      if (list.length) found.append(h("div.rl-ellipsis", { text: "⋮", "aria-hidden": "true" }));
      found.append(lineOf(extra.text, extra.probability, kind, true, extra.id));
    }
    return found;
  };

  const acceptBar = (draft) => {
    const a = draft.accept_prob;
    const track = h("span.rl-gauge.rl-accept", { "data-kind": "accept" }, h("i", { style: `width:${(100 * Math.min(1, a)).toFixed(2)}%` }));
    if (fmt.known(draft.u)) track.append(h("span.rl-draw", { style: `left:${(100 * draft.u).toFixed(2)}%`, title: `the draw: ${fmt.prob(draft.u)}` }));
    const formula = greedy() ? "1 if it is the target's first choice, else 0" : "min(1, p ÷ q)";
    return h("section.rl-dist", {},
      h("h3.rl-sub", {}, "Accept", h("span.rl-aside", { text: formula })),
      h("div.rl-bar-row", {}, h("span.rl-bar-name.rl-plain", { text: fmt.known(draft.u) ? `drew ${fmt.prob(draft.u)}` : "no draw" }), track, h("span.rl-num", { text: fmt.prob(a) })));
  };

  const bars = (row, token) => {
    const found = [];
    const subject = token.draft ? token : token.mark === "corrected" ? row.rejected : null;
    const draft = subject && subject.draft;
    if (draft && fmt.known(draft.accept_prob)) found.push(acceptBar(draft));
    if (draft) {
      const id = token.id;
      const own = token.draft ? null : token;
      const p = own ? own.emitted.p : draft.p;
      if (draft.top_p.length || fmt.known(draft.p)) found.push(block("Target", "p", draft.top_p, "p", { id, text: token.label, probability: p }));
      else found.push(h("p.rl-hint", { text: "The target never scored this place: the words before it were wrong." }));
      if (oneHot(draft)) found.push(h("section.rl-dist", {}, h("h3.rl-sub", {}, "Draft", h("span.rl-aside", { text: "q" })), h("p.rl-hint", { text: "A proposal without probabilities counts as certain: q = 1." })));
      else found.push(block("Draft", "q", draft.top_q, "q", own ? null : { id, text: token.label, probability: draft.q }));
      if (subject.mark === "rejected" && row.step.residual_top.length) {
        found.push(block("Left over", "max(0, p − q), normalised", row.step.residual_top, "residual", row.own ? { id: row.own.id, text: row.own.label } : null));
      }
    } else if (token.emitted && fmt.known(token.emitted.p)) {
      found.push(block("Target", "p of this token", [], "p", { id: token.id, text: token.label, probability: token.emitted.p }));
    }
    return found;
  };

  R.why = {
    sentence: (row, token) => SENTENCES[token.mark](row, token),
    title: (row, token) => [name(token.label, token.id), ` ${VERBS[token.mark]}`],
  };

  R.views.why = (root) => {
    const title = h("h2.rl-title");
    const note = h("span.rl-aside");
    const sentence = h("p.rl-sentence");
    const parts = h("p.rl-hint", { hidden: true });
    const body = h("div.rl-bars");
    root.append(h("div.rl-head", {}, title, note), h("div.rl-why-body", {}, sentence, parts, body));
    R.marks.keys(root);
    R.peek(root);

    const draw = () => {
      const at = store.state.hover || store.state.selection;
      const token = store.token(at);
      if (!token) {
        title.replaceChildren("Why");
        R.setText(note, "");
        R.setText(sentence, store.state.rows.length
          ? "Choose a token in the answer or in the ladder: this column says why it stayed, went or came."
          : "As soon as there are tokens, choose one: this column says why it stayed, went or came.");
        R.clear(body);
        parts.hidden = true;
        return;
      }
      const row = store.state.rows[at.step];
      title.replaceChildren("Why ", ...R.why.title(row, token));
      R.setText(note, token.draft ? place(row, token) : row.index === 0 ? "step 0, prefill" : `step ${row.index}, target`);
      root.dataset.mark = token.mark;
      sentence.replaceChildren(...R.why.sentence(row, token));
      parts.hidden = !token.part;
      if (token.part) {
        parts.replaceChildren(`Part ${token.part.n} of ${token.part.of}: the character `, name(token.part.text), " is spread over several tokens.");
      }
      body.replaceChildren(...bars(row, token));
    };
    draw();
    return (event) => {
      if (["run", "selection", "hover", "end", "parts"].includes(event)) draw();
    };
  };
})();
