(function () {
  const root = document.getElementById("@ID@");
  if (!root || root.dataset.ready) return;
  root.dataset.ready = "yes";
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const control = (name) => root.querySelector(`[name=${name}]`);
  const controls = ["schedule", "p", "m", "v", "input", "weight", "message"].map(control);
  const [schedule, p, m, v, ...prices] = controls;

  // When each action begins and ends: as soon as its rank is free and what it needs has come.
  function times({ placed, ranks }, v, [input, weight, message]) {
    const seconds = { F: 1 / v, I: input / v, W: weight / v, B: (input + weight) / v };
    const ends = {}, next = ranks.map(() => 0), free = ranks.map(() => 0), found = ranks.map(() => []);
    const name = (kind, stage, batch) => `${kind}${stage}.${batch}`;
    const from = (stage, other, end) => end + (placed[stage] === placed[other] ? 0 : message);
    function ready(kind, stage, batch) {
      if (kind === "W") return ends[name("I", stage, batch)];
      const other = kind === "F" ? stage - 1 : stage + 1;
      if (kind === "F" && stage === 0) return 0;
      if (kind !== "F" && other === placed.length) return ends[name("F", stage, batch)];
      const end = ends[name(kind === "F" ? "F" : "I", other, batch)];
      return end === undefined ? undefined : from(stage, other, end);
    }
    for (let went = true; went; ) {
      went = false;
      ranks.forEach((actions, rank) => {
        for (; next[rank] < actions.length; went = true) {
          const [kind, stage, batch] = actions[next[rank]], at = ready(kind, stage, batch);
          if (at === undefined) break;
          const start = Math.max(free[rank], at), end = (free[rank] = start + seconds[kind]);
          ends[name(kind === "B" ? "I" : kind, stage, batch)] = end;
          found[rank].push({ kind, stage, batch, start, end, chunk: placed.slice(0, stage).filter((r) => r === rank).length });
          next[rank]++;
        }
      });
    }
    return found;
  }

  function draw(found) {
    const span = Math.max(...found.flat().map((each) => each.end)), width = @WIDTH@;
    const x = (time) => (@LEFT@ + (width * time) / span).toFixed(1);
    let body = "";
    found.forEach((row, rank) => {
      const y = rank * @ROW@ + 2;
      body += `<text x="0" y="${y + 15}">rank ${rank}</text><path class="idle" d="M${x(0)} ${y + 11}H${x(span)}"/>`;
      row.forEach(({ kind, batch, start, end, chunk }) => {
        const wide = (width * (end - start)) / span, prime = "′".repeat(chunk);
        body += `<rect class="${kind}" x="${x(start)}" y="${y}" width="${wide.toFixed(1)}" height="22"/>`;
        if (wide > 12) body += `<text class="on" x="${x((start + end) / 2)}" y="${y + 15}">${batch}${prime}</text>`;
      });
    });
    const picture = root.querySelector("svg[role=img]");
    picture.setAttribute("viewBox", `0 0 640 ${found.length * @ROW@}`);
    picture.querySelector(".bars").innerHTML = body;
    return span;
  }

  function show() {
    const known = data.schedules[schedule.value];
    [...v.options].forEach((option) => { option.disabled = !(option.value in known); });
    if (v.selectedOptions[0].disabled) v.value = Object.keys(known)[0];
    v.disabled = Object.keys(known).length < 2;
    const chosen = known[v.value][`${p.value} ${m.value}`], costs = prices.map((each) => +each.value);
    prices.forEach((each, i) => { each.nextElementSibling.textContent = costs[i].toFixed(2); });
    const refused = typeof chosen === "string";
    root.querySelector(".shown").hidden = refused;
    root.querySelector(".refused").textContent = refused ? chosen : "";
    if (refused) return;
    const ranks = chosen.ranks.map((each) =>
      each.match(/.../g).map((one) => [one[0], parseInt(one[1], 36), parseInt(one[2], 36)]));
    const found = times({ placed: chosen.placed, ranks }, +v.value, costs), span = draw(found);
    const work = found.flat().reduce((sum, each) => sum + each.end - each.start, 0);
    const held = found.map((row) => {
      let now = 0, most = 0;
      row.forEach(({ kind }) => {
        now += { F: 1, B: -1, W: -1, I: 0 }[kind];
        most = Math.max(most, now);
      });
      return most / +v.value;
    });
    const say = (name, text) => { root.querySelector(`.${name}`).textContent = text; };
    say("bubble", `${(100 * (1 - work / span / found.length)).toFixed(1)} %`);
    say("span", span.toFixed(2));
    say("held", held.map((each) => +each.toFixed(2)).join(", "));
    root.querySelector("svg[role=img]").setAttribute("aria-label", `time grid of ${schedule.value}`);
  }
  controls.forEach((each) => { each.disabled = false; each.addEventListener("input", show); });
  show();
})();
