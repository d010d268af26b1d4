// The fields of a request that the form sets. Knows the form and the names of the API.

import { byId } from "./dom.js";
import { tierName } from "./stats.js";

const numbers = { temperature: "temperature", top_p: "top-p", seed: "seed",
  max_tokens: "max-tokens" };
const tierNumbers = { num_steps: "num-steps", topk: "topk", num_draft_tokens: "num-draft-tokens" };

function read(names) {
  const found = {};
  for (const [name, id] of Object.entries(names)) {
    const field = byId(id);
    if (!field.reportValidity()) return null;
    if (field.value !== "") found[name] = Number(field.value);
  }
  return found;
}

// The request's fields, or null when one of them is not valid.
export function parameters() {
  const found = read(numbers);
  if (found === null) return null;
  const speculation = chosenTier();
  return speculation === null ? null : { ...found, speculation };
}

function chosenTier() {
  if (!byId("speculate").checked) return "off";
  const choice = byId("tier").value;
  if (choice === "auto") return "auto";
  const [kind, proposer] = choice.split(":");
  if (kind === "tier") return { proposer };
  const byHand = read(tierNumbers);
  return byHand === null ? null : { proposer, ...byHand };
}

// Offers the tiers that the server has, keeping what was chosen.
export function offerTiers(speculation) {
  const select = byId("tier");
  const offers = [["auto", "server's choice"]];
  for (const tier of speculation.tiers) offers.push([`tier:${tier.proposer}`, tierName(tier)]);
  for (const name of speculation.proposers) offers.push([`hand:${name}`, `${name}, by hand`]);
  const same = offers.length === select.options.length &&
    offers.every(([value], place) => select.options[place].value === value);
  if (same) return;
  const before = select.value;
  select.replaceChildren(...offers.map(([value, label]) => new Option(label, value)));
  if (offers.some(([value]) => value === before)) select.value = before;
  showByHand();
}

function showByHand() {
  const on = byId("speculate").checked;
  byId("tier").disabled = !on;
  byId("by-hand").hidden = !on || !byId("tier").value.startsWith("hand:");
}

export function watchTier() {
  byId("speculate").addEventListener("change", showByHand);
  byId("tier").addEventListener("change", showByHand);
}
