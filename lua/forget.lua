#!lua flags=allow-oom
--[[ Removes a record, if it is still the one that somebody saw and nobody runs under it.
     One script, because between the look and the removal a handler may have been started, or may
     have ended.

  KEYS[1]  record  (string; the layout stands in src/record/codec.rs)
  ARGV[1]  seen    (27 bytes: state, holder, attempt, moment; none if it could not be read)
  Returns  1 forgotten
         | 2 absent
         | 3 in flight, what is left of its lease (milliseconds)
         | 4 changed
         | 5 unreadable
]]
local time = redis.call('TIME')
local key, seen = KEYS[1], ARGV[1]

local sub = string.sub
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local record = redis.call('GET', key)
if not record then return {2} end

local version, state = string.byte(record, 1, 2)
local readable = version == 1 and #record >= 84
local at, granted, noted
if readable then
  -- The first claim of a key leaves its times to the key's expiry. Here they are written out.
  if state == 6 or state == 7 then
    local till = redis.call('PEXPIRETIME', key) - struct.unpack('>I6', record, 71)
    if till > 0 then
      local made = math.max(till - struct.unpack('>I4', record, 77), 0)
      local fence = struct.unpack('>I6', record, 59)
      if fence + 1000 < made then fence = made end
      state = state == 6 and 1 or 5
      record = '\1' .. string.char(state) .. sub(record, 3, 58)
        .. struct.pack('>I6I6I6', fence, made, till) .. sub(record, 77)
    end
  end
  at, granted, noted = struct.unpack('>I6I4I4', record, 71)
  local answer = #record - 84 - noted
  readable = state >= 1 and state <= 5 and answer == (state == 4 and math.max(granted, 1) or 0)
end
if not readable then
  if seen ~= '' then return {5} end
  redis.call('DEL', key)
  return {1}
end

-- A deadline more than two leases away was written before the clock went back.
local held = (state == 1 or state == 5) and now < at and at - now <= granted * 2
if held then return {3, at - now} end
if sub(record, 2, 2) .. sub(record, 39, 58) .. sub(record, 71, 76) ~= seen then return {4} end
redis.call('DEL', key)
return {1}
