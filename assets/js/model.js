/* One step of the trace as tokens to draw: five marks plus target, reading order, characters split over tokens.

   A token's address within its step is {step, token}: token is the index of the draft, or drafts.length for the
   target's own token. */
(() => {
  "use strict";
  const R = window.Redline;
  if (R.model) return;

  const MARKS = {
    accepted: { name: "accepted", what: "a draft token that the target kept" },
    corrected: { name: "corrected", what: "the target's token in place of a rejected draft" },
    rejected: { name: "rejected", what: "a draft token that was tested and refused" },
    untested: { name: "never tested", what: "a draft token behind a rejection or a stop, thrown away" },
    bonus: { name: "bonus", what: "one more token from the target, because every draft was kept" },
    target: { name: "target", what: "the target's own token where nothing was drafted" },
  };

  /** Children of each draft (key -1: roots), and whether the drafts form a plain chain. */
  const family = (drafts) => {
    const children = new Map();
    let chain = true;
    drafts.forEach((draft, index) => {
      const parent = draft.parent === null || draft.parent === undefined ? -1 : draft.parent;
      if (parent !== index - 1) chain = false;
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(index);
    });
    return { children, chain };
  };

  /** Draft indices as an editor would leave them: along the accepted path, refused siblings first, the rest behind. */
  const readingOrder = (drafts, { children, chain }) => {
    if (chain) return drafts.map((_, index) => index);
    const order = [];
    const seen = new Set();
    const take = (index) => {
      if (!seen.has(index)) {
        seen.add(index);
        order.push(index);
      }
    };
    let at = -1;
    while (at !== null) {
      const kids = children.get(at) || [];
      const kept = kids.find((k) => drafts[k].verdict === "accepted");
      kids.filter((k) => drafts[k].verdict === "rejected").forEach(take);
      if (kept !== undefined) take(kept);
      at = kept === undefined ? null : kept;
    }
    drafts.forEach((_, index) => take(index));
    return order;
  };

  /** Lines for the ladder: {from: depth of its first token, under: line that it branches off, tokens: [draft indices]}.

      A chain is one line. Of a tree, the first line is what was kept, maybe nothing; every other line is a branch that
      was not, the deepest first, so that the strokes that lead down to the others cross none. */
  const lines = (drafts, { children, chain }) => {
    if (chain) return [{ from: 0, under: 0, tokens: drafts.map((_, index) => index) }];
    const rank = { accepted: 0, rejected: 1, untested: 2 };
    const kids = (index) => [...(children.get(index) || [])].sort((a, b) => rank[drafts[a].verdict] - rank[drafts[b].verdict]);
    const found = [{ from: 0, under: 0, tokens: [] }];
    const branch = (index, depth, under) => {
      const at = found.push({ from: depth, under, tokens: [] }) - 1;
      const walk = (node, level) => {
        found[at].tokens.push(node);
        const [first, ...others] = kids(node);
        if (first !== undefined) walk(first, level + 1);
        for (const other of others) branch(other, level + 1, at);
      };
      walk(index, depth);
    };
    const trunk = (parent, depth) => {
      const next = kids(parent);
      const kept = next.length && drafts[next[0]].verdict === "accepted" ? next.shift() : null;
      if (kept !== null) {
        found[0].tokens.push(kept);
        trunk(kept, depth + 1);
      }
      for (const other of next) branch(other, depth, 0);
    };
    trunk(-1, 0);
    return found;
  };

  /** Drafts of a tree that the running text leaves to the ladder: all that was not kept, but for the first that the
      target refused where it put its own token. */
  const asides = (drafts, { children, chain }) => {
    const found = new Set();
    if (chain) return found;
    let end = -1;
    drafts.forEach((draft, index) => {
      if (draft.verdict === "accepted") end = index;
      else found.add(index);
    });
    found.delete((children.get(end) || []).find((kid) => drafts[kid].verdict === "rejected"));
    return found;
  };

  /** A step of the trace and a function from id to label -> {index, step, tokens, order, chain, lines, accepted, own}. */
  const build = (step, known) => {
    const drafts = step.drafts;
    const tree = family(drafts);
    const aside = asides(drafts, tree);
    const kept = step.emitted.filter((e) => e.source === "accepted");
    const own = step.emitted.find((e) => e.source !== "accepted") || null;
    let taken = 0;
    const tokens = drafts.map((draft, index) => {
      const emitted = draft.verdict === "accepted" ? kept[taken++] : null;
      return {
        step: step.index, token: index, mark: draft.verdict, id: draft.id, label: draft.text, draft,
        flow: emitted ? emitted.text : null, emitted, part: null, aside: aside.has(index),
      };
    });
    if (own) {
      tokens.push({
        step: step.index, token: drafts.length, mark: own.source, id: own.id,
        label: own.text || known(own.id), draft: null, flow: own.text, emitted: own, part: null,
      });
    }
    const order = readingOrder(drafts, tree);
    if (own) order.push(drafts.length);
    return {
      index: step.index, step, tokens, order, own: own ? tokens[drafts.length] : null, chain: tree.chain,
      lines: lines(drafts, tree), accepted: kept.length, rejected: tokens.find((t) => t.mark === "rejected") || null,
      ms: step.draft_ms + step.verify_ms + step.overhead_ms,
    };
  };

  /** The token of a step that is worth explaining first: the refusal, else the target's own, else the last one. */
  const decisive = (row) => {
    if (row.rejected) return row.rejected.token;
    if (row.own) return row.own.token;
    return Math.max(0, row.tokens.length - 1);
  };

  /** Spoken description of a token: text, mark, place, numbers. Also its tooltip. */
  const describe = (row, token) => {
    const { fmt, text } = R;
    const place = token.draft
      ? `step ${row.index}, draft ${token.token + 1} of ${row.step.drafts.length}`
      : `step ${row.index}, the target's token`;
    const numbers = [];
    if (token.draft) {
      const { p, q, accept_prob: a, u } = token.draft;
      if (fmt.known(p)) numbers.push(`target p ${fmt.pct(p)}`);
      numbers.push(`draft q ${fmt.pct(q)}`);
      if (fmt.known(a)) numbers.push(`accepted with probability ${fmt.prob(a)}`);
      if (fmt.known(u)) numbers.push(`drew ${fmt.prob(u)}`);
    } else if (fmt.known(token.emitted.p)) numbers.push(`target p ${fmt.pct(token.emitted.p)}`);
    const part = token.part ? `, part ${token.part.n} of ${token.part.of} of “${text.label(token.part.text, 12)}”` : "";
    return `${text.label(token.label, 40) || "(no text)"} — ${MARKS[token.mark].name}${part}; ${place}; ${numbers.join(", ")}`;
  };

  R.model = { MARKS, build, decisive, describe };
})();
