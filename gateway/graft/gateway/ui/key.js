// Asks for the API key. Knows the dialog and where the key is kept.

import { key } from "./api.js";
import { byId } from "./dom.js";

// again() is called once a key was given. Returns the function that asks.
export function keyDialog(again) {
  const dialog = byId("key-dialog");
  const ask = () => {
    byId("key-open").hidden = false;
    if (!dialog.open) dialog.showModal();
  };
  byId("key-form").addEventListener("submit", () => {
    key.set(byId("key").value.trim());
    byId("key").value = "";
    again();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-open").addEventListener("click", ask);
  if (key.get()) byId("key-open").hidden = false;
  return ask;
}
