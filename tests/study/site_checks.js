// What test_site.py asks of the scripts in site/static, in Node or in a browser, and of the page of the replay.

const hexadecimal = (n, digits) => n.toString(16).padStart(digits, "0");
const bitsOf = (numbers) => Array.from(new Uint32Array(numbers.buffer), (word) => hexadecimal(word, 8)).join(" ");

// the known answers of the noise law, computed again and written like those given
function knownAnswers(law, given) {
  const words = (text) => text.split(" ").map((word) => parseInt(word, 16));
  const where = ({ key, param_id: id, shape: [first, ...rest] }) => [BigInt("0x" + key), parseInt(id, 16),
    ...(rest.length ? [first, rest.reduce((a, b) => a * b)] : [1, first ?? 1])];
  const window = (one) => {
    const [key, id, rows, cols] = where(one);
    return law.normals(key, id, one.rows ?? [0, rows], one.cols ?? [0, cols], one.stream, one.distribution);
  };
  return {
    philox: given.philox.map(({ counter, key }) => {
      const out = new Int32Array(4);
      law.philox(out, 1, ...words(counter), ...words(key));
      return bitsOf(out);
    }),
    keys: given.keys.map(({ arm, seed, step, pair }) => [law.runKey(arm, seed), law.memberKey(law.runKey(arm, seed), step, pair)]
      .map((key) => hexadecimal(key, 16))),
    parameter_ids: Object.keys(given.parameter_ids).map((name) => hexadecimal(law.parameterId(name), 8)),
    normals: given.normals.map((one) => bitsOf(window(one))),
    alternatives: given.alternatives.map((one) => bitsOf(window(one))),
    low_rank: given.low_rank.map((one) => bitsOf(law.lowRank(...where(one), one.rank, one.distribution))),
  };
}

// the coefficients of every step of a ledger, and what is said of the same ledger with one digit changed
function read(run, text) {
  const ledger = run.readLedger(text), refused = [];
  const at = text.indexOf('"tokens":', text.length / 2) + 9;
  try {
    run.readLedger(text.slice(0, at) + (9 - text[at]) + text.slice(at + 1));
  } catch (error) {
    refused.push(error.message);
  }
  return { coefficients: ledger.steps.map((step) => bitsOf(run.coefficients(run.rewardsOf(step), ledger.settings.alpha))), refused };
}

// press the page's button, and wait until the run's last weights answer: the digest found, and the page's verdict on it
async function replayed() {
  const element = (id) => document.getElementById("rp-" + id);
  element("start").click();
  if (!element("start").disabled) throw new Error("the button does nothing");
  const over = () => element("verdict").textContent && !element("answers").querySelector("tr:nth-child(2) .rp-note");
  while (!over()) await new Promise((done) => setTimeout(done, 200));
  return [element("found").textContent, element("verdict").className];
}

// which of the three models are right, for each problem that the page offers
function asked(count) {
  return Array.from({ length: count }, () => {
    const rows = Array.from(document.querySelectorAll("#rp-answers tr"), (row) => row.lastChild.className === "rp-good");
    document.getElementById("rp-next").click();
    return rows;
  });
}
