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
    const boxes = found.flat(), span = Math.max(...boxes.map((each) => each.end));
    const shortest = Math.min(...boxes.filter((each) => each.end > each.start).map((each) => each.end - each.start));
    const label = ({ batch, chunk }) => `${batch}${["", "′", "″", "‴"][chunk]}`;
    const longest = Math.max(...boxes.map((each) => label(each).length));
    const width = Math.max(@WIDTH@, Math.ceil(((3.6 * longest + 1) * span) / shortest));  // numbers stay legible
    const x = (time) => (@LEFT@ + (width * time) / span).toFixed(1);
    let body = "";
    found.forEach((row, rank) => {
      const y = rank * @ROW@ + 2;
      body += `<text x="0" y="${y + 15}">rank ${rank}</text><path class="idle" d="M${x(0)} ${y + 11}H${x(span)}"/>`;
      row.forEach((each) => {
        const { kind, start, end } = each, wide = (width * (end - start)) / span;
        body += `<rect class="${kind}" x="${x(start)}" y="${y}" width="${wide.toFixed(1)}" height="22"/>`;
        const size = Math.min(11, wide / (0.6 * label(each).length));
        if (size < 5) return;
        body += `<text class="on" x="${x((start + end) / 2)}" y="${y + 15}" font-size="${size.toFixed(1)}">${label(each)}</text>`;
      });
    });
    const picture = root.querySelector("svg[role=img]");
    picture.setAttribute("viewBox", `0 0 ${@LEFT@ + width + 4} ${found.length * @ROW@}`);
    picture.style.minWidth = width > @WIDTH@ ? `${@LEFT@ + width + 4}px` : "";
    const kinds = new Set(boxes.map((each) => each.kind));
    if (boxes.some((each) => each.chunk)) kinds.add("chunk");
    root.querySelectorAll(".key span").forEach((each) => { each.hidden = !kinds.has(each.dataset.kind); });
    picture.querySelector(".bars").innerHTML = body;
    return span;
  }

  function show() {
    const known = data.schedules[schedule.value];
    [...v.options].forEach((option) => { option.disabled = !(option.value in known); });
    if (v.selectedOptions[0].disabled) v.value = Object.keys(known)[0];
    v.disabled = Object.keys(known).length < 2;
    const chosen = known[v.value][`${p.value} ${m.value}`], costs = prices.map((each) => +each.value);
    prices.forEach((each, i) => {
      each.nextElementSibling.textContent = costs[i].toFixed(2);
      each.setAttribute("aria-valuetext", `${costs[i].toFixed(2)} forward passes`);
    });
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
    const bubble = `${(100 * (1 - work / span / found.length)).toFixed(1)} %`;
    say("bubble", bubble);
    say("span", span.toFixed(2));
    const own = found.map((row) => row[row.length - 1].end - row[0].start), longest = Math.max(...own);
    const busy = found[own.indexOf(longest)].reduce((sum, each) => sum + each.end - each.start, 0);
    say("own", longest.toFixed(2));
    say("waits", `${(100 * (1 - busy / longest)).toFixed(1)} %`);
    say("held", held.map((each) => +each.toFixed(2)).join(", "));
    const sizes = `${p.value} ranks, ${m.value} micro-batches${+v.value > 1 ? `, ${v.value} chunks` : ""}`;
    root.querySelector("svg[role=img]").setAttribute("aria-label", `time grid of ${schedule.value}: ${sizes}, ` +
      `${span.toFixed(2)} forward passes, bubble ${bubble}`);
  }
  controls.forEach((each) => { each.disabled = false; each.addEventListener("input", show); });
  show();
